"""Linear layers with explicit precision: float32 master weights, inputs and weights cast at the matrix product.

No autocast: what is computed in which dtype can be read here, is the same on every device, and costs no look-ups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from penjing.model.float8 import fits_float8, linear_float8


class Linear(nn.Linear):
    """y = x W^T (+ b), the product taken in `compute_dtype` (None: the weight's own)."""

    compute_dtype: torch.dtype | None = None
    float8: bool = False  # whether products that gradients are taken of run in float8 (see `use_float8`)

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.float8 and torch.is_grad_enabled():
            out = linear_float8(x.to(dtype), self.weight)
            return out if bias is None else out + bias
        return functional.linear(x.to(dtype), self.weight.to(dtype), bias)


def set_compute_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Set the dtype of every matrix product in `model`; the parameters stay as they are."""
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            setattr(module, "compute_dtype", dtype)  # noqa: B010 (typed as a tensor or a module by torch)


def use_float8(model: nn.Module) -> None:
    """Take the products of the linear layers of a decoder's blocks in float8 (model/float8.py) where gradients are.

    Embedding, head and routers stay as they are, and so do routed experts and layers with a side that is no multiple
    of 16. `compute_dtype` must be bfloat16.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith("blocks."):
            module.float8 = fits_float8(module.in_features, module.out_features)
