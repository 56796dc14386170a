"""RMSNorm (arXiv:1910.07467): y = x / sqrt(mean(x^2) + epsilon) * gain, over the last dimension."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.chunking import row_pieces


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
        if arena.by_hand(x):
            return self.beside(x)[1]
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon).to(dtype)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and its norm, for a residual stream: on a CPU both gradients of x are added where they are made."""
        if not arena.by_hand(x):
            return x, self(x)
        found: tuple[Tensor, Tensor] = _Normalised.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.epsilon, self.compute_dtype or x.dtype
        )
        return found


class _Normalised(torch.autograd.Function):
    """The same with its gradient written out, for CPUs: torch has one kernel for it on a GPU, and there is none here.

    Returns x too, and adds the gradient that comes there. With n = x / rms(x) and g = gain * upstream:
    dx = (g - n mean(g n)) / rms(x), d gain = sum of upstream * n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x_ND, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        ctx.set_materialize_grads(False)
        if dtype in cpu.TYPES and cpu.serves(x_ND, wide=[gain]):
            out_ND, scale_N1 = cpu.norm(x_ND, gain, epsilon, dtype)
            ctx.save_for_backward(x_ND, scale_N1, gain)
            return x, out_ND.view(x.shape)
        out_ND = arena.empty(x, x_ND.shape, dtype)
        scale_N1 = torch.empty(len(x_ND), 1, dtype=wide)
        parts = list(row_pieces(out_ND, scale_N1, x_ND))
        room_CD = arena.empty(x, parts[0][0].shape, wide) if parts else x
        for out_CD, scale_C1, x_CD in parts:
            wide_CD = room_CD[: len(x_CD)].copy_(x_CD)
            norm_C1 = torch.linalg.vector_norm(wide_CD, dim=-1, keepdim=True)
            torch.rsqrt(norm_C1.square_().div_(x.shape[-1]).add_(epsilon), out=scale_C1)
            out_CD.copy_(wide_CD.mul_(scale_C1).mul_(gain))
        ctx.save_for_backward(x_ND, scale_N1, gain)
        return x, out_ND.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, scale_N1, gain = ctx.saved_tensors
        beside, above = upstream
        if above is None:
            return beside, None, None, None
        upstream_ND = above.reshape(x_ND.shape)
        beside_ND = x_ND if beside is None else beside.reshape(x_ND.shape)
        if cpu.serves(x_ND, upstream_ND, beside_ND, wide=[gain, scale_N1]) and beside_ND.dtype == x_ND.dtype:
            given_ND = None if beside is None else beside_ND
            grad_ND, grad_gain = cpu.norm_slopes(x_ND, scale_N1, gain, upstream_ND, given_ND)
            return grad_ND.view(above.shape), grad_gain if ctx.needs_input_grad[1] else None, None, None
        grad_ND, grad_gain = arena.empty_like(x_ND), torch.zeros_like(gain)
        parts = list(row_pieces(grad_ND, x_ND, scale_N1, upstream_ND, beside_ND))
        rooms = arena.empty(x_ND, (3, *parts[0][0].shape), scale_N1.dtype) if parts else x_ND
        for grad_CD, x_CD, scale_C1, upstream_CD, beside_CD in parts:
            normal_CD, slope_CD, product_CD = rooms[:, : len(x_CD)]
            normal_CD.copy_(x_CD).mul_(scale_C1)
            slope_CD.copy_(upstream_CD)
            torch.mul(slope_CD, normal_CD, out=product_CD)
            grad_gain += product_CD.sum(dim=0)
            share_C1 = (product_CD @ gain).div_(x_ND.shape[-1])[:, None]
            slope_CD.mul_(gain).addcmul_(normal_CD, share_C1, value=-1).mul_(scale_C1)
            grad_CD.copy_(slope_CD if beside is None else slope_CD.add_(beside_CD))
        return grad_ND.view(above.shape), grad_gain if ctx.needs_input_grad[1] else None, None, None
