"""Where batches come from. A source's state is a position in the global order of samples, the same for any number of
ranks, so a run may stop with one and go on with four."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from penjing.data.packing.concat import Rows
from penjing.loader.batch import Batch, collate


class Source(Protocol):
    """Batches without end, and a place in them."""

    def __next__(self) -> Any: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class PackedSource:
    """Rows in their global order, `micro_rows` at a time; of each group of `world` batches this rank takes its own."""

    def __init__(self, rows: Rows, *, micro_rows: int, rank: int = 0, world: int = 1) -> None:
        self.rows, self.micro_rows, self.rank, self.world = rows, micro_rows, rank, world
        self._next_row = 0

    def __next__(self) -> Batch:
        first = self._next_row + self.rank * self.micro_rows
        self._next_row += self.world * self.micro_rows
        return collate([self.rows.row(index) for index in range(first, first + self.micro_rows)])

    def state(self) -> dict[str, Any]:
        return {"next_row": self._next_row}

    def restore(self, state: dict[str, Any]) -> None:
        self._next_row = int(state["next_row"])

    def samples(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """The rows between two states, by number, and the documents of the shards that stand in each."""
        rows = range(int(before["next_row"]), int(after["next_row"]))
        if not hasattr(self.rows, "documents"):
            return {"rows": list(rows)}
        # A copy, told to lay out its epoch anew: another thread may be reading ahead with the original.
        packer: Any = copy.copy(self.rows)
        packer._epoch = -1
        return {"rows": list(rows), "documents": [packer.documents(index) for index in rows]}


def place_of(source: Any) -> dict[str, Any]:
    """A source's state for use in this process: `restore` takes it, but it need not be JSON and costs nothing to make.

    Sources whose state is large have `place()` for it.
    """
    found: dict[str, Any] = getattr(source, "place", source.state)()
    return found


def samples_between(source: Any, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Which samples lie between two states of a source, on all ranks: by name where the source can tell, else the
    places in the global order."""
    name = getattr(source, "samples", None)
    if name is not None:
        return dict(name(before, after))
    places = {key for key, value in before.items() if isinstance(value, int)}
    return {"places": {key: [before[key], after.get(key)] for key in sorted(places)}}
