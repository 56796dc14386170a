"""Sources of batches. A source's state is a position in the global order of samples. It does not depend on the number
of ranks, so a run may stop on one rank and resume on four."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from penjing.base.seeds import derive
from penjing.data.packing.concat import Rows
from penjing.loader.batch import Batch, collate


class Source(ABC):
    """An endless iterator of batches, with a position. Most sources override the first three methods only."""

    micro_size: int | None = None  # units of one batch, if batches can shrink during a run
    split = Fraction(1)  # how many batches now replace each original batch; a step has a whole number of them
    exact = True  # whether a step's gradient does not depend on its split into batches

    @abstractmethod
    def __next__(self) -> Any: ...

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The position after the last returned batch, as JSON values."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` or `position` returned."""

    def position(self) -> dict[str, Any]:
        """Like `state`, for use in this process: it need not be JSON, and is cheap."""
        return self.state()

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """The samples between two positions, over all ranks, by name if the source has names."""
        keys = {key for key, value in before.items() if isinstance(value, int)}
        return {"places": {key: [before[key], after.get(key)] for key in sorted(keys)}}

    def fresh(self) -> Source:
        """A second source at its beginning, for trial steps. Raises TypeError if the source does not support it."""
        raise TypeError(f"{type(self).__name__} cannot be made twice")

    def shrink(self, position: dict[str, Any]) -> bool:
        """Make the batches smaller and go back to `position`; False if they cannot become smaller."""
        return False

    def close(self) -> None:  # noqa: B027 (most have nothing to stop)
        """Stop background threads."""


class WrappedSource(Source):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __next__(self) -> Any:
        return next(self.source)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state)

    def position(self) -> dict[str, Any]:
        return self.source.position()

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return self.source.samples(before, after)

    def close(self) -> None:
        self.source.close()


class DeviceSource(WrappedSource):
    """A source whose batches are moved to the device without a background thread."""

    def __init__(self, source: Source, device: torch.device) -> None:
        super().__init__(source)
        self.device = device

    def __next__(self) -> Any:
        return next(self.source).to(self.device)


class OrderedSource(Source):
    """Batches of `batch_size` units in an endless global order. Of every `world` batches, this rank takes one."""

    def __init__(
        self, make: Callable[[range], Any], state_key: str, batch_size: int, rank: int = 0, world: int = 1
    ) -> None:
        """make: the batch of the units at these indices of the order. state_key: of the next index, in `state`."""
        self.make, self.state_key, self.batch_size = make, state_key, batch_size
        self.rank, self.world = rank, world
        self._next = 0

    def __next__(self) -> Any:
        first = self._next + self.rank * self.batch_size
        self._next += self.world * self.batch_size
        return self.make(range(first, first + self.batch_size))

    def state(self) -> dict[str, Any]:
        return {self.state_key: self._next}

    def restore(self, state: dict[str, Any]) -> None:
        self._next = int(state[self.state_key])


class PackedSource(OrderedSource):
    """Packed rows in their global order, `micro_size` at a time. make: for batches with more than the rows. noise_seed:
    of the rows' `Batch.noise_B`; None: no noise."""

    def __init__(
        self,
        rows: Rows,
        *,
        micro_size: int,
        rank: int = 0,
        world: int = 1,
        make: Callable[[range], Batch] | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.rows, self._noise_seed = rows, noise_seed
        self._make_rows = make or (lambda indices: collate([rows.row(index) for index in indices]))
        super().__init__(self._batch, "next_row", micro_size, rank, world)

    def _batch(self, indices: range) -> Batch:
        batch = self._make_rows(indices)
        if self._noise_seed is None:
            return batch
        return replace(batch, noise_B=torch.tensor([derive(self._noise_seed, index) for index in indices]))

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """The indices of the rows between two positions, and the shards' documents in each row."""
        rows = range(int(before["next_row"]), int(after["next_row"]))
        packer = self.rows.copy()  # a prefetch thread may be using the original
        return {"rows": list(rows), "documents": [packer.documents(index) for index in rows]}
