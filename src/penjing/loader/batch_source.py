"""Where batches come from. A source's state is a position in the global order of samples, the same for any number of
ranks, so a run may stop with one and go on with four."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from penjing.data.packing.concat import Rows
from penjing.loader.batch import Batch, collate


class Source(ABC):
    """Batches without end, and a place in them. Most sources override the first three methods only."""

    micro_size: int | None = None  # units of one batch, where batches can become smaller on the way
    split = 1  # batches that are now made of one at first
    exact = True  # whether the gradient of a step is the same however it is split

    @abstractmethod
    def __next__(self) -> Any: ...

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """JSON values: the place after the last batch handed out."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go to the place of a `state` or of a `place`."""

    def place(self) -> dict[str, Any]:
        """As `state`, for use in this process: it need not be JSON, and costs nothing to make."""
        return self.state()

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """What lies between two places, on all ranks: by name where the source knows names."""
        places = {key for key, value in before.items() if isinstance(value, int)}
        return {"places": {key: [before[key], after.get(key)] for key in sorted(places)}}

    def fresh(self) -> Source:
        """Another one at the beginning, for trials. A source that cannot be made twice refuses."""
        raise TypeError(f"{type(self).__name__} cannot be made twice")

    def shrink(self, at: dict[str, Any]) -> bool:
        """Halve the batches and go back to the place `at`; False where they cannot become smaller."""
        return False

    def close(self) -> None:  # noqa: B027 (most have nothing to stop)
        """Stop what works in the background."""


class WrappedSource(Source):
    """Another source's batches, at its places."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __next__(self) -> Any:
        return next(self.source)

    def state(self) -> dict[str, Any]:
        return self.source.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state)

    def place(self) -> dict[str, Any]:
        return self.source.place()

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return self.source.samples(before, after)

    def close(self) -> None:
        self.source.close()


class DeviceSource(WrappedSource):
    """A source whose batches are moved to the device in line."""

    def __init__(self, source: Source, device: torch.device) -> None:
        super().__init__(source)
        self.device = device

    def __next__(self) -> Any:
        return next(self.source).to(self.device)


class StridedSource(Source):
    """Units in their global order, `batch_size` at a time; of each group of `world` batches this rank takes its own."""

    place_name: ClassVar[str]  # in the state: the unit with which the next group of batches begins

    def __init__(self, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self._next_unit = 0

    @abstractmethod
    def batch(self, indices: range) -> Any:
        """The units at these places of the endless order."""

    def __next__(self) -> Any:
        first = self._next_unit + self.rank * self.batch_size
        self._next_unit += self.world * self.batch_size
        return self.batch(range(first, first + self.batch_size))

    def state(self) -> dict[str, Any]:
        return {self.place_name: self._next_unit}

    def restore(self, state: dict[str, Any]) -> None:
        self._next_unit = int(state[self.place_name])


class PackedSource(StridedSource):
    """Packed rows."""

    place_name = "next_row"

    def __init__(self, rows: Rows, *, micro_size: int, rank: int = 0, world: int = 1) -> None:
        super().__init__(micro_size, rank, world)
        self.rows = rows

    def batch(self, indices: range) -> Batch:
        return collate([self.rows.row(index) for index in indices])

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """The rows between two states, by number, and the documents of the shards that stand in each."""
        rows = range(int(before["next_row"]), int(after["next_row"]))
        # A copy, told to lay out its epoch anew: another thread may be reading ahead with the original.
        packer: Any = copy.copy(self.rows)
        packer._epoch = -1
        return {"rows": list(rows), "documents": [packer.documents(index) for index in rows]}
