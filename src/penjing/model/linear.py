"""Linear layers with explicit precision: float32 master weights, inputs and weights cast at the matrix product.

No autocast: what is computed in which dtype can be read here, is the same on every device, and costs no look-ups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class Linear(nn.Linear):
    """y = x W^T (+ b), the product taken in `compute_dtype` (None: the weight's own)."""

    compute_dtype: torch.dtype | None = None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(x.to(dtype), self.weight.to(dtype), bias)


def set_compute_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Set the dtype of every matrix product in `model`; the parameters stay as they are."""
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            setattr(module, "compute_dtype", dtype)  # noqa: B010 (typed as a tensor or a module by torch)
