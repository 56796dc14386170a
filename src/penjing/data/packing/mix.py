"""Rows of several sources in given shares.

Which source the row at an index comes from is a pure function of the index: multiples of the golden ratio modulo 1
fall into each source's part of [0, 1) in its share, within a few rows, in every stretch of the stream (Weyl). So any
process can build any row, and a run resumes exactly, with any number of ranks. A source that has given all rows that it
may has no part any more: those of the others grow.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penjing.base.seeds import derive
from penjing.data.packing.concat import IntArray, Row, Rows

CHUNK = 4096  # rows whose sources are computed at once
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_TURN = 1 << 64
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class MixedSource:
    """Rows of one source, and the index of its first document in the shards."""

    name: str
    rows: Rows
    first_document: int = 0


class MixedRows(Rows):
    """Rows of each source in their own endless stream, mixed by shares of tokens.

    An epoch has as many rows as an epoch of each source together; a source with a larger share than its part of the
    data repeats within it.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        shares: Sequence[float],
        *,
        seed: int,
        final_shares: Sequence[float] = (),
        final_row: int = 0,
        max_epochs: Sequence[float] = (),
    ) -> None:
        """shares: of the tokens. final_shares: those of the row `final_row` and all later ones; empty: no change.

        max_epochs: of each source, after which it gives no more rows, while another with a share may; 0: no limit.
        """
        self.sources, self.final_row = list(sources), final_row
        first = self.sources[0].rows
        self.shards, self.seq_len, self.end_of_text = first.shards, first.seq_len, first.end_of_text
        self.order, self.seed = first.order, derive(seed, "mix")
        self.phases = [_by_rows(self.sources, given) for given in (shares, final_shares) if given]
        epochs = max_epochs or [0] * len(self.sources)
        limits = zip(epochs, self.sources, strict=True)
        most_S = [max(1, math.floor(most * one.rows.rows_per_epoch)) if most else _NO_LIMIT for most, one in limits]
        self.limit_S = np.array(most_S)
        self.rows_per_epoch = sum(source.rows.rows_per_epoch for source in self.sources)
        filled = float(np.dot(self.phases[0], [source.rows.filled for source in self.sources]))
        self.padding_per_epoch = round(self.rows_per_epoch * self.seq_len * (1 - filled))
        self._before: list[IntArray] = [np.zeros(len(self.sources), dtype=np.int64)]  # rows of each before each chunk
        self._chunk, self._source_C, self._number_C = -1, np.zeros(0, np.int64), np.zeros(0, np.int64)

    def copy(self) -> "MixedRows":
        rows = copy.copy(self)
        rows.sources = [MixedSource(one.name, one.rows.copy(), one.first_document) for one in self.sources]
        rows._before = list(self._before)
        return rows

    def _build_layout(self) -> None:
        """Each source has its own."""

    def _arrange(self, epoch: int) -> None:
        """Each source has its own order."""

    def place(self, index: int) -> tuple[int, int]:
        """The source of a row, and the row's index in that source's stream."""
        chunk, position = divmod(index, CHUNK)
        if chunk != self._chunk:
            while len(self._before) <= chunk + 1:
                found = np.bincount(self._sources_of(len(self._before) - 1), minlength=len(self.sources))
                self._before.append(self._before[-1] + found)
            source_C = self._sources_of(chunk)
            number_C = np.zeros(CHUNK, dtype=np.int64)
            for number, before in enumerate(self._before[chunk]):
                is_of = source_C == number
                number_C[is_of] = before + np.arange(np.count_nonzero(is_of))
            self._chunk, self._source_C, self._number_C = chunk, source_C, number_C
        return int(self._source_C[position]), int(self._number_C[position])

    def counts(self, num_rows: int) -> list[int]:
        """Rows of each source among the first `num_rows`."""
        self.place(num_rows)
        chunk, position = divmod(num_rows, CHUNK)
        found = np.bincount(self._source_C[:position], minlength=len(self.sources))
        return [int(count) for count in self._before[chunk] + found]

    def _sources_of(self, chunk: int) -> IntArray:
        """The source of each row of a chunk."""
        index_C = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint64)
        left_S, parts, first = self.limit_S - self._before[chunk], list[IntArray](), 0
        while first < CHUNK:
            found = self._found(index_C[first:], left_S > 0)
            too_many = [np.flatnonzero(found == n)[left:] for n, left in enumerate(left_S) if 0 < left < CHUNK]
            end = min((int(places[0]) for places in too_many if len(places)), default=len(found))
            parts.append(found[:end])
            left_S -= np.bincount(found[:end], minlength=len(left_S))
            first += end
        return np.concatenate(parts)

    def _found(self, index_C: npt.NDArray[np.uint64], is_open_S: npt.NDArray[np.bool_]) -> IntArray:
        """The sources of rows, of those that may give more."""
        point_C = index_C * np.uint64(_GOLDEN) + np.uint64(self.seed)  # modulo 2^64
        found = [_find(_of_open(share_S, is_open_S), point_C) for share_S in self.phases]
        return found[0] if len(found) == 1 else np.where(index_C >= self.final_row, found[1], found[0])

    def row(self, index: int) -> Row:
        source, number = self.place(index)
        return self.sources[source].rows.row(number)

    def documents(self, index: int) -> list[int]:
        source, number = self.place(index)
        one = self.sources[source]
        return [one.first_document + document for document in one.rows.documents(number)]


def _by_rows(sources: Sequence[MixedSource], shares: Sequence[float]) -> npt.NDArray[np.float64]:
    """Shares of rows that give these shares of tokens: rows of conversations have padding."""
    share_S = np.asarray(shares, dtype=np.float64) / [one.rows.filled for one in sources]
    scaled: npt.NDArray[np.float64] = share_S / share_S.sum()
    return scaled


def _of_open(share_S: npt.NDArray[np.float64], is_open_S: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """The shares without sources that may give no more, unless that leaves none."""
    left_S = share_S * is_open_S
    return share_S if is_open_S.all() or not left_S.sum() else left_S / left_S.sum()


def _find(share_S: npt.NDArray[np.float64], point_C: npt.NDArray[np.uint64]) -> IntArray:
    """The source in whose part of [0, 2^64) each point lies."""
    ends = [min(_TURN - 1, round(float(end) * _TURN)) for end in np.cumsum(share_S)[:-1]]
    found: IntArray = np.searchsorted(np.asarray(ends, dtype=np.uint64), point_C, side="right").astype(np.int64)
    return found
