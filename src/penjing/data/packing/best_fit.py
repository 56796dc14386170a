"""Rows of whole documents and no padding: the layout for pretraining (best-fit packing, arXiv:2404.10830).

A stream cut every T tokens splits many documents, and the text after a cut has lost its context. Here a document of at
most T positions stays in one row if possible. Pieces of a few documents fill the gaps at the ends of rows.
"""

from itertools import chain

import numpy as np

from penjing.base.seeds import derive
from penjing.data.packing.concat import BLOCK_ROWS, FixedRows, IntArray, Row, best_fit
from penjing.data.tokenizer.bpe_dropout import BpeDropout

Segment = tuple[int, int, int]  # document, first position, length


class BestFitRows(FixedRows):
    """Rows for pretraining, each a list of segments (document, first position, length).

    A document of n tokens has n + 1 positions: it starts with the end-of-text token, and each target is the next token,
    after the last one the end-of-text token. A document longer than T is cut every T positions. Each epoch has a layout
    of its own: a novel is not cut at the same places again. Attention does not cross documents, so it does not matter
    which ones share a row. Fewer than T positions are left out.
    """

    repacks = True
    bpe_dropout: BpeDropout | None = None  # other tokens each epoch; rows beyond `rows_per_epoch` are left out
    _layout_epoch = -1

    def _build_layout(self) -> None:
        self._positions_D = self.shards.end_D - self.shards.start_D + 1
        self._set_num_rows(int(self._positions_D.sum()))
        self._lay_out(0)

    def _arrange(self, epoch: int, num_rows: int = 0) -> None:
        if self.bpe_dropout:
            self.shards, self._layout_epoch = self.bpe_dropout.epoch(epoch), -1
            self._positions_D = self.shards.end_D - self.shards.start_D + 1
        self._lay_out(epoch if self.repacks and self.order != "fixed" else 0)
        super()._arrange(epoch, len(self.first_R) - 1)

    def _lay_out(self, epoch: int) -> None:
        """Lay out the rows of an epoch. From the second on, documents over T start with a shorter piece."""
        if epoch == self._layout_epoch:
            return
        generator = np.random.Generator(np.random.PCG64(derive(self.seed, "layout", epoch))) if epoch else None
        self.segment_S3, self.first_R = build_layout(self._positions_D, self.seq_len, generator)
        self._layout_epoch = epoch

    def documents(self, index: int) -> list[int]:
        row = self._row_number(index)
        return [int(source) for source in self.segment_S3[self.first_R[row] : self.first_R[row + 1], 0]]

    def row(self, index: int) -> Row:
        row = self._row_number(index)
        sequences = []
        for source, start, length in self.segment_S3[self.first_R[row] : self.first_R[row + 1]].tolist():
            first, end = int(self.shards.start_D[source]), int(self.shards.end_D[source])
            # Position p reads token p - 1 and predicts token p, with the end-of-text token at both ends.
            token_ids = self.shards.token_N[max(first, first + start - 1) : min(end, first + start + length)]
            prefix = [self.end_of_text] if start == 0 else []
            suffix = [self.end_of_text] if first + start + length > end else []
            sequences.append(np.concatenate((prefix, token_ids, suffix)).astype(np.int64))
        ids = np.concatenate([sequence[:-1] for sequence in sequences])
        target = np.concatenate([sequence[1:] for sequence in sequences])
        document = np.repeat(np.arange(len(sequences)), [len(sequence) - 1 for sequence in sequences])
        assert len(ids) == self.seq_len
        return Row(ids, target, document, np.ones(self.seq_len, dtype=np.float32))


def build_layout(
    positions_D: IntArray, seq_len: int, generator: np.random.Generator | None = None
) -> tuple[IntArray, IntArray]:
    """Segments [S, 3] of (document, first position, length), and the first segment of each row, [rows + 1].

    Every row is full. Documents are not split, except those over `seq_len` and the few that fill gaps. Rows follow the
    order of the documents, in blocks of about `BLOCK_ROWS` rows; the remainder of a block starts the next one.
    generator: draws the length of the first piece of each document over `seq_len`, and which documents of a block come
    first among equally long ones; None: `seq_len`, and the first ones.
    """
    first_D = np.full(len(positions_D), seq_len)
    if generator is not None:
        first_D = np.where(positions_D > seq_len, generator.integers(1, seq_len + 1, len(positions_D)), seq_len)
    ends_D = np.cumsum(positions_D)
    cuts = np.searchsorted(ends_D, np.arange(1, ends_D[-1] // (BLOCK_ROWS * seq_len) + 1) * BLOCK_ROWS * seq_len)
    rows: list[list[Segment]] = []
    remaining: list[Segment] = []
    for documents in np.split(np.arange(len(positions_D)), np.unique(cuts)):
        if generator is not None:
            documents = generator.permutation(documents)
        lengths = [(int(d), int(positions_D[d]), int(first_D[d])) for d in documents]
        segments = [
            (d, start, min(seq_len, end - start) if start else min(first, end))
            for d, end, first in lengths
            for start in (0, *range(first, end, seq_len))
        ]
        full_rows, remaining = _fill_rows(remaining + segments, seq_len)
        rows += full_rows
    counts = np.array([0, *(len(segments) for segments in rows)])
    segment_S3 = np.array(list(chain.from_iterable(rows)), dtype=np.int64).reshape(-1, 3)
    return segment_S3, np.cumsum(counts)


def _fill_rows(segments: list[Segment], seq_len: int) -> tuple[list[list[Segment]], list[Segment]]:
    """Full rows of these segments, and the remaining segments (less than one row)."""
    if not segments:
        return [], []
    bins = best_fit(np.array([length for _, _, length in segments]), seq_len)
    partial_rows = sorted(([segments[index] for index in group] for group in bins), key=_size, reverse=True)
    sizes = [_size(row) for row in partial_rows]
    # Keep the fullest rows; the segments of the others fill their gaps. All positions together fill num_full rows.
    num_full = sum(sizes) // seq_len
    filler = list(chain.from_iterable(partial_rows[num_full:]))[::-1]
    full = zip(partial_rows[:num_full], sizes[:num_full], strict=True)
    return [row + _take(filler, seq_len - size) for row, size in full], filler


def _size(segments: list[Segment]) -> int:
    return sum(length for _, _, length in segments)


def _take(filler: list[Segment], count: int) -> list[Segment]:
    """Take `count` positions off the end of `filler`, cutting the last segment taken."""
    taken = []
    while count:
        document, start, length = filler.pop()
        length_used = min(length, count)
        taken.append((document, start, length_used))
        if length_used < length:
            filler.append((document, start + length_used, length - length_used))
        count -= length_used
    return taken
