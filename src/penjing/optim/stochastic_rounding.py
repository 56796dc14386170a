"""Optimizer state in bfloat16 that forgets nothing on average: what is stored is rounded up or down by chance."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 1 << 16  # of float32's mantissa that bfloat16 has not


def stochastic_round(value: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up with the probability of how far it is on the way (arXiv:1502.02551, section 3.1).

    Rounded to nearest, a running mean with weight 0.05 stands still once its changes are below 1/256 of it.
    """
    bits = value.float().contiguous().view(torch.int32)
    chance = torch.randint(_LOW_BITS, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    # What is added overflows from the low half into the high one as often as it should; the low half is then dropped.
    return ((bits + chance) & -_LOW_BITS).view(torch.float32).to(torch.bfloat16)
