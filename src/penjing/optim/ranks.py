"""The ranks that share an optimizer's work; a strategy (parallel/base.py) is one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ranks(Protocol):
    """`rank` of `world` processes with equal parameters, gradients and state."""

    rank: int
    world: int

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with that of rank `source`."""
        ...


class _OneRank:
    rank, world = 0, 1

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        pass


ONE_RANK: Ranks = _OneRank()
