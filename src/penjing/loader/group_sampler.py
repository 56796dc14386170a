"""Groups (a prompt and its answers) in a global order, as batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penjing.base.seeds import derive
from penjing.loader.batch_source import StridedSource
from penjing.loader.shared_prompt_batch import AnswerBatch, Group, pack

# Rows of a batch are as long as its longest group up to a power of two: attention's work grows with the row, and
# libraries keep a kernel for every shape that they have met.
SMALLEST_ROW = 128


class GroupSource(StridedSource):
    """Each epoch's groups in an order drawn from its seed, `micro_units` at a time.

    make: the group of an index, 0..num_groups - 1. The place is a position in the order over all ranks and epochs.
    """

    place_name = "next_group"

    def __init__(
        self,
        make: Callable[[int], Group],
        num_groups: int,
        *,
        micro_units: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__(micro_units, rank, world)
        self.make, self.num_groups, self.seed = make, num_groups, seed
        self._epoch = -1

    def batch(self, indices: range) -> AnswerBatch:
        return pack_tight([self.make(self._index(place)) for place in indices])

    def _index(self, place: int) -> int:
        epoch, within = divmod(place, self.num_groups)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, epoch)))
            self._order = generator.permutation(self.num_groups)
            self._epoch = epoch
        return int(self._order[within])


def pack_tight(groups: list[Group]) -> AnswerBatch:
    """Rows only about as long as the longest group: most groups are short."""
    longest = max(group.num_tokens for group in groups)
    return pack(groups, max(SMALLEST_ROW, 1 << (longest - 1).bit_length()))
