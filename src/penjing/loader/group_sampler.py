"""Groups (a prompt and its answers) in a global order, as batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penjing.base.seeds import derive
from penjing.loader.batch_source import OrderedSource
from penjing.loader.shared_prompt_batch import AnswerBatch, Group, pack

# Rows of a batch are as long as its longest group up to a power of two: attention's work grows with the row, and
# libraries keep a kernel for every shape that they have met.
SMALLEST_ROW = 128


class EpochOrder:
    """Which of `count` things stands at each place of an endless order: each epoch is a permutation of its own, which
    follows from the seed and the epoch's number."""

    def __init__(self, count: int, seed: int, *parts: object) -> None:
        self.count, self.seed, self.parts, self._epoch = count, seed, parts, -1

    def __getitem__(self, place: int) -> int:
        epoch, index = divmod(place, self.count)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, *self.parts, epoch)))
            self._order, self._epoch = generator.permutation(self.count), epoch
        return int(self._order[index])


def group_source(
    group: Callable[[int], Group], order: EpochOrder, micro_size: int, rank: int = 0, world: int = 1
) -> OrderedSource:
    """Groups in this order, `micro_size` at a time. group: that of an index."""
    return OrderedSource(
        lambda places: pack_tight([group(order[place]) for place in places]), "next_group", micro_size, rank, world
    )


def pack_tight(groups: list[Group]) -> AnswerBatch:
    """Rows only about as long as the longest group: most groups are short."""
    longest = max(group.num_tokens for group in groups)
    return pack(groups, max(SMALLEST_ROW, 1 << (longest - 1).bit_length()))
