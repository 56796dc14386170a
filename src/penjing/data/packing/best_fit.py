"""Rows of whole documents and no padding: the layout for pretraining (best-fit packing, arXiv:2404.10830).

A stream cut every T tokens breaks many documents; what follows the cut has lost what it speaks of. Here a document of
at most T positions stays in one row wherever possible, and the few gaps left at the ends of rows are filled with pieces
of a few documents set aside for it.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from penjing.data.packing.concat import BLOCK_ROWS, FixedRows, IntArray, Row, best_fit

Segment = tuple[int, int, int]  # document, first position, length


class BestFitRows(FixedRows):
    """Rows for pretraining, each a list of segments (document, first position, length).

    A document of n tokens has n + 1 positions: it opens with the end-of-text token and every position's target is the
    token after it, the last one's the end-of-text token. One longer than T is cut every T positions. The layout is
    made once; attention never crosses documents, so who shares a row with whom is of no consequence. Less than one
    row's worth of positions is left out.
    """

    def _lay_out(self) -> None:
        positions_D = self.shards.end_D - self.shards.start_D + 1
        self._fill(int(positions_D.sum()))
        self.segment_S3, self.first_R = lay_out(positions_D, self.seq_len)

    def documents(self, index: int) -> list[int]:
        row = self._number(index)
        return [int(source) for source in self.segment_S3[self.first_R[row] : self.first_R[row + 1], 0]]

    def row(self, index: int) -> Row:
        row = self._number(index)
        sequences = []
        for source, start, length in self.segment_S3[self.first_R[row] : self.first_R[row + 1]].tolist():
            first, end = int(self.shards.start_D[source]), int(self.shards.end_D[source])
            # Position p reads token p - 1 and predicts token p, with the end-of-text token at both ends.
            token_ids = self.shards.token_N[max(first, first + start - 1) : min(end, first + start + length)]
            opened = [self.end_of_text] if start == 0 else []
            closed = [self.end_of_text] if first + start + length > end else []
            sequences.append(np.concatenate((opened, token_ids, closed)).astype(np.int64))
        ids = np.concatenate([sequence[:-1] for sequence in sequences])
        target = np.concatenate([sequence[1:] for sequence in sequences])
        document = np.repeat(np.arange(len(sequences)), [len(sequence) - 1 for sequence in sequences])
        assert len(ids) == self.seq_len
        return Row(ids, target, document, np.ones(self.seq_len, dtype=np.float32))


def lay_out(positions_D: IntArray, seq_len: int) -> tuple[IntArray, IntArray]:
    """Segments [S, 3] of (document, first position, length), and where each row begins in them, [rows + 1].

    Every row is full. Documents are whole but for those over `seq_len` and the few that fill gaps. Rows follow the
    order of the documents, a block of about `BLOCK_ROWS` rows at a time; what is left of one block begins the next.
    """
    ends_D = np.cumsum(positions_D)
    cuts = np.searchsorted(ends_D, np.arange(1, ends_D[-1] // (BLOCK_ROWS * seq_len) + 1) * BLOCK_ROWS * seq_len)
    rows: list[list[Segment]] = []
    rest: list[Segment] = []
    for documents in np.split(np.arange(len(positions_D)), np.unique(cuts)):
        whole = [(int(d), int(positions_D[d])) for d in documents]
        cut = [(d, start, min(seq_len, end - start)) for d, end in whole for start in range(0, end, seq_len)]
        made, rest = _fill_rows(rest + cut, seq_len)
        rows += made
    counts = np.array([0, *(len(segments) for segments in rows)])
    flat = np.array(list(chain.from_iterable(rows)), dtype=np.int64).reshape(-1, 3)
    return flat, np.cumsum(counts)


def _fill_rows(pieces: list[Segment], seq_len: int) -> tuple[list[list[Segment]], list[Segment]]:
    """Full rows from these pieces, and the pieces that are left (less than a row's worth)."""
    if not pieces:
        return [], []
    bins = best_fit(np.array([length for _, _, length in pieces]), seq_len)
    packed = sorted(([pieces[index] for index in each] for each in bins), key=_size, reverse=True)
    fill = [_size(segments) for segments in packed]
    # The fullest rows, as many as the others can complete: all positions together fill just so many.
    kept = sum(fill) // seq_len
    filler = list(chain.from_iterable(packed[kept:]))[::-1]
    rows = []
    for segments, size in zip(packed[:kept], fill[:kept], strict=True):
        rows.append(segments + _take(filler, seq_len - size))
    return rows, filler


def _size(segments: list[Segment]) -> int:
    return sum(length for _, _, length in segments)


def _take(filler: list[Segment], need: int) -> list[Segment]:
    """Take `need` positions off the end of `filler`, cutting the last segment taken."""
    taken = []
    while need:
        document, start, length = filler.pop()
        used = min(length, need)
        taken.append((document, start, used))
        if used < length:
            filler.append((document, start + used, length - used))
        need -= used
    return taken
