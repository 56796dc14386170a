"""The formulas everybody uses, as they stand in textbooks and blogs; docs/cost.md shows where they go wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass


def seconds(parameters: float, tokens: float, flops_per_second: float) -> float:
    """6 N D / peak."""
    return 6 * parameters * tokens / flops_per_second


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of training in float32 with Adam: weights, gradients, two moments. No activations, no logits, no cache."""

    weights: float
    gradients: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.moments


def states(parameters: float) -> States:
    return States(4 * parameters, 4 * parameters, 8 * parameters)


def memory_bytes(parameters: float) -> float:
    """16 bytes for each parameter, and 1.3 GB for the CUDA context (a V100 with CUDA 11.2 in 2022)."""
    return 16 * parameters + 1.3e9


def steps(examples: int, epochs: float, batch: int) -> int:
    """Optimizer steps, where every example is a row and each epoch ends with what is left over."""
    return math.ceil(math.ceil(examples / batch) * epochs)
