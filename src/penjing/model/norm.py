"""RMSNorm (arXiv:1910.07467): y = x / sqrt(mean(x^2) + epsilon) * gain, over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """Normalise the last dimension to unit root mean square, then scale by a learned gain.

    The statistics are taken in float32 whatever the input. The output comes in `compute_dtype` (None: the input's
    dtype, as in `transformers`), for the several matrix products that follow to share it.
    """

    compute_dtype: torch.dtype | None = None

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or x.dtype
        if x.device.type == "cpu" and torch.is_grad_enabled():
            return _Normalised.apply(x, self.weight, self.epsilon, dtype)  # type: ignore[no-any-return,no-untyped-call]
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(dtype)


class _Normalised(torch.autograd.Function):
    """The same with its gradient written out, for CPUs: torch has one kernel for it on a GPU, and there is none here.

    With n = x / rms(x) and g = gain * upstream: dx = (g - n mean(g n)) / rms(x), d gain = sum of upstream * n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt_()
        normal = wide * scale
        ctx.save_for_backward(normal, scale, gain)
        ctx.dtype = x.dtype
        return (normal * gain).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, gain = ctx.saved_tensors
        slope = upstream[0].float()
        grad_gain = (slope * normal).flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        slope = slope * gain
        share = (slope * normal).mean(dim=-1, keepdim=True)
        grad = slope.addcmul_(normal, share, value=-1).mul_(scale)
        return grad.to(ctx.dtype), grad_gain, None, None
