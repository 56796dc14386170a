"""Where batches come from. A source's state is a position in the global order of samples, the same for any number of
ranks, so a run may stop with one and go on with four."""

from __future__ import annotations

from typing import Any, Protocol

from penjing.feed.batch import Batch, collate
from penjing.text.pack import Rows


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
