"""Whether ops on a tensor have the manual backward passes of `autograd_functions`."""

from __future__ import annotations

import torch
from torch import Tensor

LARGE_VALUES = 1 << 19  # elements of a large tensor
WIDE = 512  # width of a wide tensor


def uses_manual_backward(x: Tensor) -> bool:
    """Whether ops on x use `autograd_functions`: on a CPU, not compiled, and either in training or with a large
    x."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or x.numel() >= LARGE_VALUES


def saves_memory(x: Tensor) -> bool:
    """Whether ops also recompute to save memory: if x is wide. Steps of narrow models would take a tenth longer. In
    training this depends on the width alone, so that the planner's few rows take the same path as many."""
    return x.shape[-1] >= WIDE and uses_manual_backward(x)
