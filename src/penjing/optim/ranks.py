"""The ranks that share an optimizer's work; a strategy (parallel/base.py) is one."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """`rank` of `world` processes with equal parameters, gradients and state."""

    rank: int
    world: int

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrite the tensors with those of rank `source`."""
        ...


class _OneRank:
    rank, world = 0, 1

    def broadcast_tensors(self, tensors: Sequence[Tensor], source: int) -> None:
        pass


ONE_RANK: Ranks = _OneRank()


def owner_of_each(costs: Sequence[float], world: int) -> list[int]:
    """The rank that does each piece of work: the dearest piece first, each for the rank with the least so far."""
    owners, loads = [0] * len(costs), [0.0] * world
    for piece in sorted(range(len(costs)), key=lambda piece: costs[piece], reverse=True):
        owners[piece] = loads.index(min(loads))
        loads[owners[piece]] += costs[piece]
    return owners
