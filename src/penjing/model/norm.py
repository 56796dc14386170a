"""RMSNorm (arXiv:1910.07467, equation 4): y = x / sqrt(mean(x^2) + epsilon) * gain, over the last dimension."""

import torch
from torch import Tensor, nn

from penjing.kernels import ops


class RMSNorm(nn.Module):
    """Normalise the last dimension to unit root mean square, then scale by a learned gain.

    The statistics are in float32 whatever the input. The output comes in `compute_dtype` (None: the input's dtype, as
    in `transformers`), so that all matmuls that follow share it.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.epsilon, self.compute_dtype or x.dtype)

    def forward_with_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and its norm, for a residual stream: one kernel adds their gradients."""
        return ops.rms_norm_with_residual(x, self.weight, self.epsilon, self.compute_dtype or x.dtype)
