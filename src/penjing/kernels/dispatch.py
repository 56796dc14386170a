"""The facts by which `ops.py` chooses a backend for a tensor: device, shape, whether a compiler or a tape is at work.

What a backend takes it says itself: `cpu.ops.supports...` (C kernels), `triton.ops.supports...`,
`varlen_attention.supports_varlen`, `fp8.fits_float8`.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGE_VALUES = 1 << 19  # of a tensor that counts as large
WIDE = 512  # width of a tensor that counts as wide


def uses_manual_backward(x: Tensor) -> bool:
    """Whether ops on x go through `autograd_functions`: on a CPU, without a compiler, in training or where x is
    large."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or x.numel() >= LARGE_VALUES


def saves_memory(x: Tensor) -> bool:
    """Whether recomputing to save memory pays too: the same where x is wide. Narrow models' steps would take a tenth
    longer.

    By its width alone in training, for the planner to find few rows made as many are.
    """
    return x.shape[-1] >= WIDE and uses_manual_backward(x)
