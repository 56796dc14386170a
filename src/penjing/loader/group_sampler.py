"""Groups (a prompt and its answers) in a global order, as batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penjing.base.seeds import derive
from penjing.loader.batch_source import Source
from penjing.loader.shared_prompt_batch import AnswerBatch, Group, pack

# Rows of a batch are as long as its longest group up to a power of two: attention's work grows with the row, and
# libraries keep a kernel for every shape that they have met.
SMALLEST_ROW = 128


class GroupSource(Source):
    """Each epoch's groups in an order drawn from its seed, `micro_units` at a time; ranks take turns.

    make: the group of an index, 0..num_groups - 1. The place is a position in the order over all ranks and epochs.
    """

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
        self.make, self.num_groups, self.micro_units = make, num_groups, micro_units
        self.seed, self.rank, self.world = seed, rank, world
        self._next_group = 0
        self._epoch = -1

    def __next__(self) -> AnswerBatch:
        first = self._next_group + self.rank * self.micro_units
        self._next_group += self.world * self.micro_units
        return pack_tight([self.make(self._index(place)) for place in range(first, first + self.micro_units)])

    def _index(self, place: int) -> int:
        epoch, within = divmod(place, self.num_groups)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive(self.seed, epoch)))
            self._order = generator.permutation(self.num_groups)
            self._epoch = epoch
        return int(self._order[within])

    def state(self) -> dict[str, Any]:
        return {"next_group": self._next_group}

    def restore(self, state: dict[str, Any]) -> None:
        self._next_group = int(state["next_group"])


def pack_tight(groups: list[Group]) -> AnswerBatch:
    """Rows only about as long as the longest group: most groups are short."""
    longest = max(group.num_tokens for group in groups)
    return pack(groups, max(SMALLEST_ROW, 1 << (longest - 1).bit_length()))
