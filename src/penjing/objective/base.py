"""The contract of an objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Loss:
    """total: the sum over units, to be differentiated. parts: sums for the curves, under the names of their means."""

    total: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


class ObjectiveSettings:
    """What a run asks the settings of its objective, whichever it is. A class overrides what differs."""

    @property
    def indivisible_units(self) -> int:
        """Units that one forward pass must hold together."""
        return 1


class Objective(Protocol):
    """Sums over units (tokens, pairs, answers), never means.

    The loop adds `weight` over micro-batches and ranks and divides once, so that accumulation, ragged masks, packing
    and data parallelism are exact for every objective at the same time.
    """

    unit: str

    def weight(self, batch: Any) -> Tensor:
        """How many units the batch counts, before any forward pass."""
        ...

    def __call__(self, model: Callable[..., Tensor], batch: Any) -> Loss: ...
