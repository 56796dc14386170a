"""Matmuls of a frozen weight plus its LoRA adapter, with backward passes of their own."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.autograd_functions import saves_memory
from penjing.kernels.cpu import tensor_arena as arena


class AdaptedMatmul(torch.autograd.Function):
    """W x + b + s B A x with W and b frozen: no gradients for them, and two passes fewer over outputs and inputs than a
    sum of three matmuls needs. x is in the weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
        mask: Tensor | None,
        mask_scale: float,
    ) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1])
        mask_NI = None if mask is None else mask.reshape(x_NI.shape)
        masked_NI = x_NI if mask_NI is None else (x_NI * mask_NI).mul_(mask_scale)
        a_cast_RI, b_cast_OR = a_RI.to(x.dtype), b_OR.to(x.dtype)
        inner_NR = masked_NI @ a_cast_RI.T
        in_arena = bias_O is None and saves_memory(x)
        out_NO = arena.matmul(x_NI, weight_OI.T) if in_arena else functional.linear(x_NI, weight_OI, bias_O)
        out_NO.addmm_(inner_NR, b_cast_OR.T, alpha=scale)
        ctx.save_for_backward(masked_NI, inner_NR, weight_OI, a_cast_RI, b_cast_OR, mask_NI)
        ctx.scale, ctx.mask_scale, ctx.shape, ctx.dtypes = scale, mask_scale, x.shape, (a_RI.dtype, b_OR.dtype)
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        masked_NI, inner_NR, weight_OI, a_cast_RI, b_cast_OR, mask_NI = ctx.saved_tensors
        a_dtype, b_dtype = ctx.dtypes
        grad_NO = upstream[0].reshape(-1, weight_OI.shape[0])
        grad_NR = (grad_NO @ b_cast_OR).mul_(ctx.scale)
        grad_a_RI = (grad_NR.T @ masked_NI).to(a_dtype) if ctx.needs_input_grad[3] else None
        grad_b_OR = (grad_NO.T @ inner_NR).to(b_dtype).mul_(ctx.scale) if ctx.needs_input_grad[4] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_NI = arena.matmul(grad_NO, weight_OI) if saves_memory(grad_NO) else grad_NO @ weight_OI
            if mask_NI is None:
                grad_NI.addmm_(grad_NR, a_cast_RI)
            else:
                grad_NI += (grad_NR @ a_cast_RI).mul_(mask_NI).mul_(ctx.mask_scale)
            grad_x = grad_NI.view(ctx.shape)
        return grad_x, None, None, grad_a_RI, grad_b_OR, None, None, None


class PackedMatmul(torch.autograd.Function):
    """The same for several layers with one input, without bias and dropout: x is read once for all of them, and the
    gradient of x is one sum. The weights are concatenated on each use; the concatenation is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Sequence[float], *tensors: Tensor) -> Tensor:
        """tensors: the weights of all layers, then each A, then each B."""
        count = len(scales)
        weights_OI, factors = tensors[:count], tensors[count:]
        x_NI = x.reshape(-1, x.shape[-1])
        a_cast_RI = torch.cat([a_RI.to(x.dtype) for a_RI in factors[:count]])
        bs_OR = [b_OR.to(x.dtype) for b_OR in factors[count:]]
        inner_NR = x_NI @ a_cast_RI.T
        out_NJ = functional.linear(x_NI, torch.cat(weights_OI))
        outs_NO, parts_NR = _split(out_NJ, inner_NR, bs_OR)
        for out_NO, part_NR, b_cast_OR, scale in zip(outs_NO, parts_NR, bs_OR, scales, strict=True):
            out_NO.addmm_(part_NR, b_cast_OR.T, alpha=scale)
        ctx.save_for_backward(x_NI, inner_NR, a_cast_RI, *weights_OI, *bs_OR)
        ctx.scales, ctx.shape, ctx.dtype = scales, x.shape, factors[0].dtype
        return out_NJ.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, inner_NR, a_cast_RI, *saved = ctx.saved_tensors
        weights_OI, bs_OR = saved[: len(ctx.scales)], saved[len(ctx.scales) :]
        grad_NJ = upstream[0].flatten(0, -2)
        grads_NO, inners_NR = _split(grad_NJ, inner_NR, bs_OR)
        parts = list(zip(grads_NO, inners_NR, bs_OR, ctx.scales, strict=True))
        grad_NR = torch.cat([(grad_NO @ b_cast_OR).mul_(scale) for grad_NO, _, b_cast_OR, scale in parts], dim=1)
        ranks = [b_cast_OR.shape[1] for b_cast_OR in bs_OR]
        grads_a = torch.split((grad_NR.T @ x_NI).to(ctx.dtype), ranks)
        grads_b = [(grad_NO.T @ part_NR).to(ctx.dtype).mul_(scale) for grad_NO, part_NR, _, scale in parts]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NJ @ torch.cat(weights_OI)).addmm_(grad_NR, a_cast_RI).view(ctx.shape)
        return grad_x, None, *(None for _ in weights_OI), *grads_a, *grads_b


def _split(packed_NJ: Tensor, inner_NR: Tensor, bs_OR: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split both into each layer's columns."""
    outputs, ranks = ([b_cast_OR.shape[axis] for b_cast_OR in bs_OR] for axis in (0, 1))
    return torch.split(packed_NJ, outputs, dim=1), torch.split(inner_NR, ranks, dim=1)
