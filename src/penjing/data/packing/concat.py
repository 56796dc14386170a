"""Pack documents into rows of T tokens with document ids, without padding.

Packers are pure functions of (shards, row length, seed): any process can build row `index` of the endless stream of
epochs at any time. A row has T inputs and T targets; a target is the token after its input.
"""

import copy
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

# Documents are packed in blocks: large enough for a good fit, small enough to keep roughly the files' order.
BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row: ids_T, target_T, document_T (the document of each position), weight_T (0 or 1)."""

    ids_T: IntArray
    target_T: IntArray
    document_T: IntArray
    weight_T: npt.NDArray[np.float32]


class Rows(ABC):
    """Rows of an endless stream; epoch = index // rows_per_epoch.

    order: `shuffled` draws a new order each epoch. `as_given` keeps the files' order, for a curriculum, and shuffles
    only within blocks of 256 rows. `fixed` does not shuffle.
    """

    rows_per_epoch: int
    padding_per_epoch = 0  # positions without a token, in one epoch

    def __init__(
        self, shards: TokenShards, seq_len: int, *, end_of_text: int, seed: int, order: Order = "shuffled"
    ) -> None:
        self.shards, self.seq_len, self.end_of_text, self.seed = shards, seq_len, end_of_text, seed
        self.order = order
        self._epoch = -1
        self._build_layout()

    def copy(self) -> "Rows":
        """The same rows, for another thread: it draws its epoch's order itself."""
        rows = copy.copy(self)
        rows._epoch = -1
        return rows

    @property
    def filled(self) -> float:
        """The fraction of the positions that hold a token, in one epoch."""
        return 1 - self.padding_per_epoch / (self.rows_per_epoch * self.seq_len)

    @abstractmethod
    def _build_layout(self) -> None:
        """Compute, once, the number of rows and what all epochs share. Raises UserError if there is no row."""

    @abstractmethod
    def _arrange(self, epoch: int) -> None:
        """Draw one epoch's order."""

    @abstractmethod
    def row(self, index: int) -> Row: ...

    @abstractmethod
    def documents(self, index: int) -> list[int]:
        """The documents of the shards in row `index`."""

    def _epoch_index(self, index: int) -> int:
        """The index of a row within its epoch; draws that epoch's order if needed."""
        epoch, position = divmod(index, self.rows_per_epoch)
        if epoch != self._epoch:
            self._arrange(epoch)
            self._epoch = epoch
        return position

    def _set_num_rows(self, num_positions: int) -> None:
        """Set the number of full rows for so many positions."""
        self.rows_per_epoch = num_positions // self.seq_len
        if not self.rows_per_epoch:
            what = "too little text for one row"
            got = f"{self.shards.num_tokens} tokens"
            hint = "Give more text or a smaller data.seq_len."
            raise UserError(what, where=self.shards.folder, got=got, wanted=f"at least {self.seq_len}", next_step=hint)


class ConcatRows(Rows):
    """Pretraining: all documents as one stream, in a new order each epoch, cut every T tokens.

    The end-of-text token follows each document; its position also starts the next one. There is no padding, and every
    token is a target. The stream is a ring: from the second epoch on the first row starts anywhere in its first T
    tokens, so that the cuts move. The remainder after the last full row (less than T tokens) is left out of the epoch.
    """

    def _build_layout(self) -> None:
        self._length_D = self.shards.end_D - self.shards.start_D + 1
        self._set_num_rows(int(self._length_D.sum()) - 1)

    def _arrange(self, epoch: int) -> None:
        self._order_D = np.arange(self.shards.num_documents)
        if self.order == "shuffled":
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, "documents", epoch)))
            self._order_D = generator.permutation(self._order_D)
        # Stream position of each document's start: the end-of-text token that ended the document before.
        self._begin_D = np.concatenate(([0], np.cumsum(self._length_D[self._order_D])))
        moves = epoch > 0 and self.order != "fixed"
        self._phase = derive(self.seed, "phase", epoch) % self.seq_len if moves else 0

    def row(self, index: int) -> Row:
        turns, position = np.divmod(self._positions(index), self._begin_D[-1])
        document = np.searchsorted(self._begin_D[:-1], position, side="right") - 1
        # In the stream a document is an end-of-text token and then its own tokens.
        offset = position - self._begin_D[document]
        token = self.shards.token_N[self.shards.start_D[self._order_D[document]] + np.maximum(offset - 1, 0)]
        stream = np.where(offset == 0, self.end_of_text, token).astype(np.int64)
        document = document + turns * len(self._order_D)  # the ring's first document again is another one
        return Row(stream[:-1], stream[1:], document[:-1], np.ones(self.seq_len, dtype=np.float32))

    def _positions(self, index: int) -> IntArray:
        """The stream positions of a row's inputs and of its last target."""
        first = self._epoch_index(index) * self.seq_len + self._phase
        return np.arange(first, first + self.seq_len + 1)

    def documents(self, index: int) -> list[int]:
        positions = self._positions(index)[:-1] % self._begin_D[-1]
        numbers = np.searchsorted(self._begin_D[:-1], positions, side="right") - 1
        return [int(document) for document in self._order_D[list(dict.fromkeys(numbers.tolist()))]]


class FixedRows(Rows):
    """Rows that are laid out before, in a different order each epoch."""

    repacks = False  # whether each epoch has a layout of its own

    def _arrange(self, epoch: int, num_rows: int = 0) -> None:
        """num_rows: that are laid out in this epoch, if not `rows_per_epoch`."""
        generator = np.random.Generator(np.random.PCG64(derive(self.seed, "rows", epoch)))
        rows = np.arange(num_rows or self.rows_per_epoch)
        if self.order == "shuffled":
            rows = generator.permutation(rows)
        elif self.order == "as_given":
            blocks = [rows[first : first + BLOCK_ROWS] for first in range(0, len(rows), BLOCK_ROWS)]
            rows = np.concatenate([generator.permutation(block) for block in blocks])
        self._order = np.resize(rows, self.rows_per_epoch)

    def _row_number(self, index: int) -> int:
        """The row at `index` of the stream."""
        position = self._epoch_index(index)  # first, as it draws the order
        return int(self._order[position])


class PackedRows(FixedRows):
    """Chats: each in one row, placed where it leaves the least free space (best fit, longest first).

    The free positions at the ends of rows are padding of weight 0. The layout is built once.
    """

    def _build_layout(self) -> None:
        shards, seq_len = self.shards, self.seq_len
        length_D = shards.end_D - shards.start_D - 1
        if shards.num_documents == 0:
            raise UserError("no conversation fits", where=shards.folder, wanted=f"some of at most {seq_len} tokens")
        if int(length_D.max()) > seq_len:
            what = "a conversation is longer than a row"
            got = f"{int(length_D.max())} tokens"
            hint = "Give a larger data.seq_len, or the chats themselves as data.train."
            raise UserError(what, where=shards.folder, got=got, wanted=f"at most {seq_len}", next_step=hint)
        self._bins = best_fit(length_D, seq_len)
        self.rows_per_epoch = len(self._bins)
        self.padding_per_epoch = self.rows_per_epoch * seq_len - int(length_D.sum())

    def documents(self, index: int) -> list[int]:
        return self._bins[self._row_number(index)]

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
    """Best-fit decreasing bin packing: the documents of each row. Every length must be at most `capacity`.

    Rows are looked up by their number of free positions, which has few values: O(documents x log capacity) comparisons.
    """
    assert int(length_D.max(initial=0)) <= capacity
    bins: list[list[int]] = []
    rows_by_free: dict[int, list[int]] = {}  # rows by number of free positions
    free_sizes: list[int] = []  # the sorted keys of rows_by_free
    for source in np.argsort(-length_D, kind="stable"):
        length = int(length_D[source])
        smallest = bisect_left(free_sizes, length)
        if smallest == len(free_sizes):
            bins.append([])
            row, free = len(bins) - 1, capacity
        else:
            free = free_sizes[smallest]
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                del free_sizes[smallest]
        bins[row].append(int(source))
        same_free = rows_by_free.setdefault(free - length, [])
        if not same_free:
            insort(free_sizes, free - length)
        same_free.append(row)
    return bins
