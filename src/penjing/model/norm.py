"""RMSNorm (arXiv:1910.07467): y = x / sqrt(mean(x^2) + epsilon) * gain, over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.model.pieces import row_pieces


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
        if x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Normalised.apply(x, self.weight, self.epsilon, dtype)  # type: ignore[no-any-return,no-untyped-call]
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(dtype)


class _Normalised(torch.autograd.Function):
    """The same with its gradient written out, for CPUs: torch has one kernel for it on a GPU, and there is none here.

    With n = x / rms(x) and g = gain * upstream: dx = (g - n mean(g n)) / rms(x), d gain = sum of upstream * n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        out_ND = torch.empty(x_ND.shape, dtype=dtype)
        scale_N1 = torch.empty(len(x_ND), 1)
        for out_CD, scale_C1, x_CD in row_pieces(out_ND, scale_N1, x_ND):
            wide_CD = x_CD.float()
            norm_C1 = torch.linalg.vector_norm(wide_CD, dim=-1, keepdim=True)
            torch.rsqrt(norm_C1.square_().div_(x.shape[-1]).add_(epsilon), out=scale_C1)
            out_CD.copy_((wide_CD * scale_C1).mul_(gain))
        ctx.save_for_backward(x_ND, scale_N1, gain)
        return out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, scale_N1, gain = ctx.saved_tensors
        upstream_ND = upstream[0].reshape(x_ND.shape)
        grad_ND, grad_gain = torch.empty_like(x_ND), torch.zeros_like(gain)
        for grad_CD, x_CD, scale_C1, upstream_CD in row_pieces(grad_ND, x_ND, scale_N1, upstream_ND):
            normal_CD, slope_CD = x_CD * scale_C1, upstream_CD.float()
            product_CD = slope_CD * normal_CD
            grad_gain += product_CD.sum(dim=0)
            share_C1 = (product_CD @ gain).div_(x_ND.shape[-1])[:, None]
            grad_CD.copy_((slope_CD * gain).addcmul_(normal_CD, share_C1, value=-1).mul_(scale_C1))
        return grad_ND.view(upstream[0].shape), grad_gain if ctx.needs_input_grad[1] else None, None, None
