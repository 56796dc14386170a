"""RMSNorm (arXiv:1910.07467): y = x / sqrt(mean(x^2) + epsilon) * gain, over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalise the last dimension to unit root mean square, then scale by a learned gain.

    The statistics are taken in float32 whatever the input; the output has the input's dtype, as in `transformers`.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(x.dtype)
