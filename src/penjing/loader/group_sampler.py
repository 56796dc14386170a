"""Batches of groups (a prompt and its answers) in a global order."""

from collections.abc import Callable

import numpy as np

from penjing.base.seeds import derive
from penjing.loader.batch_source import OrderedSource
from penjing.loader.shared_prompt_batch import AnswerBatch, Group, pack

# A batch's row length is that of its longest group, rounded up to a power of two: attention's cost grows with the
# length, and libraries cache a kernel for every shape.
SMALLEST_ROW = 128


class EpochOrder:
    """An endless order of `count` indices. Each epoch is a permutation seeded by the seed and the epoch's number."""

    def __init__(self, count: int, seed: int, *parts: object) -> None:
        self.count, self.seed, self.parts, self._epoch = count, seed, parts, -1

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.count)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, *self.parts, epoch)))
            self._order, self._epoch = generator.permutation(self.count), epoch
        return int(self._order[index])


def group_source(
    group: Callable[[int], Group], order: EpochOrder, micro_size: int, rank: int = 0, world: int = 1
) -> OrderedSource:
    """Groups in this order, `micro_size` at a time. group: returns the group of an index."""

    def make(positions: range) -> AnswerBatch:
        return pack_tight([group(order[position]) for position in positions])

    return OrderedSource(make, "next_group", micro_size, rank, world)


def pack_tight(groups: list[Group]) -> AnswerBatch:
    """Pack into rows about as long as the longest group, because most groups are short."""
    longest = max(group.num_tokens for group in groups)
    return pack(groups, max(SMALLEST_ROW, 1 << (longest - 1).bit_length()))
