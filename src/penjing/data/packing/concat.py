"""Documents to rows of a fixed number of tokens, with document ids, so that no position is spent on padding.

Packers are pure functions of (shards, row length, seed): row `index` of the endless stream of epochs can be made at any
time, in any process. A row has T inputs and T targets, the token after each input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.data.token_shards import TokenShards

IntArray = npt.NDArray[np.int64]
Order = Literal["shuffled", "as_given", "fixed"]

# Documents are laid out a block at a time: enough for a good fit, few enough that rows keep to the files' order.
BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row: ids_T, target_T, document_T (which document a position belongs to), weight_T (0 or 1)."""

    ids_T: IntArray
    target_T: IntArray
    document_T: IntArray
    weight_T: npt.NDArray[np.float32]


class Rows(ABC):
    """Rows of an endless stream; epoch = index // rows_per_epoch.

    order: `shuffled` draws a new order each epoch; `as_given` keeps to the files, for a curriculum: only rows of one
    block of about 256 change places; `fixed` changes nothing.
    """

    rows_per_epoch: int
    tokens_per_epoch: int  # targets that count, in one epoch
    padding_per_epoch = 0  # positions that hold no token, in one epoch

    def __init__(
        self, shards: TokenShards, seq_len: int, *, end_of_text: int, seed: int, order: Order = "shuffled"
    ) -> None:
        self.shards, self.seq_len, self.end_of_text, self.seed = shards, seq_len, end_of_text, seed
        self.order = order
        self._epoch = -1
        self._lay_out()

    @abstractmethod
    @abstractmethod
    def _lay_out(self) -> None:
        """Once: how many rows there are, and what all epochs have in common. Raises UserError if there is no row."""

    @abstractmethod
    def _arrange(self, epoch: int) -> None:
        """Draw one epoch's order."""

    @abstractmethod
    def row(self, index: int) -> Row: ...

    @abstractmethod
    def documents(self, index: int) -> list[int]:
        """Which documents of the shards stand in row `index`."""

    def _place(self, index: int) -> int:
        """Where a row stands in its epoch, whose order is drawn if the last one was another's."""
        epoch, place = divmod(index, self.rows_per_epoch)
        if epoch != self._epoch:
            self._arrange(epoch)
            self._epoch = epoch
        return place

    def _fill(self, num_positions: int) -> None:
        """As many full rows as there are positions for."""
        self.rows_per_epoch = num_positions // self.seq_len
        self.tokens_per_epoch = self.rows_per_epoch * self.seq_len
        if not self.rows_per_epoch:
            raise UserError(
                "too little text for one row",
                where=self.shards.folder,
                got=f"{self.shards.num_tokens} tokens",
                wanted=f"at least {self.seq_len}",
                next_step="Give more text or a smaller data.seq_len.",
            )


class ConcatRows(Rows):
    """Pretraining: all documents in an order drawn anew each epoch, as one stream cut every T tokens.

    Each document is followed by the end-of-text token, whose position also opens the next document; no padding, and
    every token is a target. What is left after the last full row (less than T tokens) waits for the next epoch, where
    the order is another.
    """

    def _lay_out(self) -> None:
        self._length_D = self.shards.end_D - self.shards.start_D + 1
        self._fill(int(self._length_D.sum()) - 1)

    def _arrange(self, epoch: int) -> None:
        self._order_D = np.arange(self.shards.num_documents)
        if self.order == "shuffled":
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, "documents", epoch)))
            self._order_D = generator.permutation(self._order_D)
        # Stream position where each document begins. It opens with the end-of-text token that closed the one before.
        self._begin_D = np.concatenate(([0], np.cumsum(self._length_D[self._order_D])))

    def row(self, index: int) -> Row:
        place = self._place(index) * self.seq_len + np.arange(self.seq_len + 1)
        document = np.searchsorted(self._begin_D, place, side="right") - 1
        # In the stream a document is its opening end-of-text token and then its own tokens.
        offset = place - self._begin_D[document]
        token = self.shards.token_N[self.shards.start_D[self._order_D[document]] + np.maximum(offset - 1, 0)]
        stream = np.where(offset == 0, self.end_of_text, token).astype(np.int64)
        return Row(stream[:-1], stream[1:], document[:-1], np.ones(self.seq_len, dtype=np.float32))

    def documents(self, index: int) -> list[int]:
        begin = self._place(index) * self.seq_len
        first = int(np.searchsorted(self._begin_D, begin, side="right")) - 1
        last = int(np.searchsorted(self._begin_D, begin + self.seq_len, side="left"))
        return [int(which) for which in self._order_D[first:last]]


class FixedRows(Rows):
    """Rows that are the same ones in every epoch, in another order."""

    def _arrange(self, epoch: int) -> None:
        generator = np.random.Generator(np.random.PCG64(derive(self.seed, "rows", epoch)))
        rows = np.arange(self.rows_per_epoch)
        if self.order == "shuffled":
            rows = generator.permutation(rows)
        elif self.order == "as_given":
            blocks = [rows[first : first + BLOCK_ROWS] for first in range(0, len(rows), BLOCK_ROWS)]
            rows = np.concatenate([generator.permutation(block) for block in blocks])
        self._order = rows

    def _number(self, index: int) -> int:
        """Which of the rows stands at `index`."""
        place = self._place(index)
        return int(self._order[place])


class PackedRows(FixedRows):
    """Chats: each whole in one row, laid into the row where it leaves the least room (best fit, longest first).

    The little room left at the ends of rows is padding of weight 0. The layout is made once.
    """

    def _lay_out(self) -> None:
        shards, seq_len = self.shards, self.seq_len
        length_D = shards.end_D - shards.start_D - 1
        if shards.num_documents == 0:
            raise UserError("no conversation fits", where=shards.folder, wanted=f"some of at most {seq_len} tokens")
        if int(length_D.max()) > seq_len:
            raise UserError(
                "a conversation is longer than a row",
                where=shards.folder,
                got=f"{int(length_D.max())} tokens",
                wanted=f"at most {seq_len}",
                next_step="Give a larger data.seq_len, or the chats themselves as data.train.",
            )
        self._bins = best_fit(length_D, seq_len)
        self.rows_per_epoch = len(self._bins)
        weights = shards.weight_N
        assert weights is not None
        # The first token of a chat is never a target.
        self.tokens_per_epoch = int(weights.sum(dtype=np.int64)) - int(weights[shards.start_D].sum(dtype=np.int64))
        self.padding_per_epoch = self.rows_per_epoch * seq_len - int(length_D.sum())

    def documents(self, index: int) -> list[int]:
        return self._bins[self._number(index)]

    def row(self, index: int) -> Row:
        ids = np.full(self.seq_len, self.end_of_text, dtype=np.int64)
        target = ids.copy()
        document = np.full(self.seq_len, -1, dtype=np.int64)
        weight = np.zeros(self.seq_len, dtype=np.float32)
        assert self.shards.weight_N is not None
        filled = 0
        for number, source in enumerate(self.documents(index)):
            first, end = int(self.shards.start_D[source]), int(self.shards.end_D[source])
            part = slice(filled, filled + end - first - 1)
            ids[part] = self.shards.token_N[first : end - 1]
            target[part] = self.shards.token_N[first + 1 : end]
            weight[part] = self.shards.weight_N[first + 1 : end]
            document[part] = number
            filled = part.stop
        return Row(ids, target, document, weight)


def best_fit(length_D: IntArray, capacity: int) -> list[list[int]]:
    """Best-fit decreasing: which documents share a row. Every length must be at most `capacity`.

    Rows are found by their number of free places, of which there are few: O(documents x log capacity) comparisons.
    """
    assert int(length_D.max(initial=0)) <= capacity
    bins: list[list[int]] = []
    with_free: dict[int, list[int]] = {}  # rows by free places
    rooms: list[int] = []  # the numbers of free places that some row has, in order
    for source in np.argsort(-length_D, kind="stable"):
        need = int(length_D[source])
        smallest = bisect_left(rooms, need)
        if smallest == len(rooms):
            bins.append([])
            row, room = len(bins) - 1, capacity
        else:
            room = rooms[smallest]
            row = with_free[room].pop()
            if not with_free[room]:
                del rooms[smallest]
        bins[row].append(int(source))
        left = with_free.setdefault(room - need, [])
        if not left:
            insort(rooms, room - need)
        left.append(row)
    return bins
