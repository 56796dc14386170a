"""Rows of whole documents and no padding: the layout for pretraining (best-fit packing, arXiv:2404.10830).

A stream cut every T tokens breaks many documents; what follows the cut has lost what it speaks of. Here a document of
at most T positions stays in one row wherever possible, and the few gaps left at the ends of rows are filled with pieces
of a few documents set aside for it.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.text.pack import Row, best_fit
from penjing.text.shards import Shards

IntArray = npt.NDArray[np.int64]


class WholeRows:
    """Rows for pretraining, each a list of segments (document, first position, length).

    A document of n tokens has n + 1 positions: it opens with the end-of-text token and every position's target is the
    token after it, the last one's the end-of-text token. One longer than T is cut every T positions. The layout is
    made once and its rows come in an order of their own each epoch; attention never crosses documents, so who shares a
    row with whom is of no consequence. Less than one row's worth of positions is left out.
    """

    def __init__(self, shards: Shards, row_tokens: int, *, end_of_text: int, seed: int, shuffle: bool = True) -> None:
        self.shards, self.row_tokens, self.end_of_text, self.seed = shards, row_tokens, end_of_text, seed
        self.shuffle = shuffle
        positions_D = shards.end_D - shards.start_D + 1
        if int(positions_D.sum()) < row_tokens:
            raise UserError(
                "too little text for one row",
                where=shards.folder,
                got=f"{shards.num_tokens} tokens",
                wanted=f"at least {row_tokens}",
                next_step="Give more text or a smaller data.row_tokens.",
            )
        self.segment_S3, self.first_R = lay_out(positions_D, row_tokens)
        self.rows_per_epoch = len(self.first_R) - 1
        self.tokens_per_epoch = self.rows_per_epoch * row_tokens
        self.padding_per_epoch = 0
        self._epoch = -1

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, self.rows_per_epoch)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, "rows", epoch)))
            self._order = generator.permutation(self.rows_per_epoch) if self.shuffle else np.arange(self.rows_per_epoch)
            self._epoch = epoch
        ids = np.empty(self.row_tokens, dtype=np.int64)
        target = np.empty_like(ids)
        document = np.empty_like(ids)
        row = int(self._order[place])
        filled = 0
        for number, segment in enumerate(self.segment_S3[self.first_R[row] : self.first_R[row + 1]].tolist()):
            source, start, length = segment
            part = slice(filled, filled + length)
            first, end = int(self.shards.start_D[source]), int(self.shards.end_D[source])
            # Position p reads token p - 1 and predicts token p, with the end-of-text token at both ends.
            said = self.shards.token_N[max(first, first + start - 1) : min(end, first + start + length)]
            opened = [self.end_of_text] if start == 0 else []
            closed = [self.end_of_text] if first + start + length > end else []
            sequence = np.concatenate((opened, said, closed)).astype(np.int64)
            ids[part], target[part], document[part] = sequence[:-1], sequence[1:], number
            filled += length
        assert filled == self.row_tokens
        return Row(ids, target, document, np.ones(self.row_tokens, dtype=np.float32))


def lay_out(positions_D: IntArray, row_tokens: int) -> tuple[IntArray, IntArray]:
    """Segments [S, 3] of (document, first position, length), and where each row begins in them, [rows + 1].

    Every row is full. Documents are whole but for those over `row_tokens` and the few that fill gaps.
    """
    full_D, rest_D = positions_D // row_tokens, positions_D % row_tokens
    long = [(int(d), row_tokens * piece, row_tokens) for d in np.flatnonzero(full_D) for piece in range(full_D[d])]
    small = np.flatnonzero(rest_D)
    bins = best_fit(rest_D[small], row_tokens) if len(small) else []
    rows: list[list[tuple[int, int, int]]] = [[segment] for segment in long]
    packed = [
        [(int(small[i]), int(row_tokens * full_D[small[i]]), int(rest_D[small[i]])) for i in each] for each in bins
    ]
    packed.sort(key=lambda segments: -sum(length for _, _, length in segments))
    fill = [sum(length for _, _, length in segments) for segments in packed]
    kept = _rows_to_keep(fill, row_tokens)
    filler = list(chain.from_iterable(packed[kept:]))[::-1]
    for segments, size in zip(packed[:kept], fill[:kept], strict=True):
        rows.append(segments + _take(filler, row_tokens - size))
    while sum(length for _, _, length in filler) >= row_tokens:
        rows.append(_take(filler, row_tokens))
    counts = np.array([0, *(len(segments) for segments in rows)])
    flat = np.array(list(chain.from_iterable(rows)), dtype=np.int64).reshape(-1, 3)
    return flat, np.cumsum(counts)


def _rows_to_keep(fill: list[int], row_tokens: int) -> int:
    """How many of the fullest rows can be completed from what the others hold."""
    gaps, spare = 0, sum(fill)
    for kept, size in enumerate(fill):
        gaps, spare = gaps + row_tokens - size, spare - size
        if gaps > spare:
            return kept
    return len(fill)


def _take(filler: list[tuple[int, int, int]], need: int) -> list[tuple[int, int, int]]:
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
