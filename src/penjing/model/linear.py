"""Linear layers with explicit precision: float32 master weights, inputs and weights cast at the matrix product.

No autocast: what is computed in which dtype can be read here, is the same on every device, and costs no look-ups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.fp8 import fits_float8, linear_float8


class Linear(nn.Linear):
    """y = x W^T (+ b), the product taken in `compute_dtype` (None: the weight's own)."""

    compute_dtype: torch.dtype | None = None
    float8: bool = False  # whether products that gradients are taken of run in float8 (see `use_float8`)
    cast: Tensor | None = None  # the weight in `compute_dtype`, for products without gradients (transformer.keep_casts)

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.cast is not None and not torch.is_grad_enabled():
            return functional.linear(x.to(dtype), self.cast, bias)
        if self.float8 and torch.is_grad_enabled():
            out = linear_float8(x.to(dtype), self.weight)
            return out if bias is None else out + bias
        if arena.serves(x):
            (out,) = _Products.apply(x, dtype, self.weight)  # type: ignore[no-untyped-call]
            return out if bias is None else out + bias
        return functional.linear(x.to(dtype), self.weight.to(dtype), bias)


def linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Each layer's output for the same x, [..., N] -> [..., O] each, in its `compute_dtype`."""
    if not arena.serves(x) or not torch.is_grad_enabled():
        return tuple(layer(x) for layer in layers)
    plain, dtype = _alike(*layers)
    if dtype is None:
        return tuple(layer(x) for layer in layers)
    outs = _Products.apply(x, dtype, *(layer.weight for layer in plain))  # type: ignore[no-untyped-call]
    return tuple(
        out if layer.bias is None else out + layer.bias.to(dtype) for layer, out in zip(plain, outs, strict=True)
    )


def joined(x: Tensor, *layers: nn.Module) -> Tensor:
    """The layers' outputs one after another in each row, [..., N] -> [..., sum of O]: one product where it can be."""
    plain, dtype = _alike(*layers)
    biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
    if dtype is None or 0 < len(biases) < len(plain):
        join = getattr(layers[0], "join", lambda *_: None)  # layers with adapters know how
        out: Tensor | None = join(x, *layers)
        return torch.cat([layer(x) for layer in layers], dim=-1) if out is None else out
    weight = torch.cat([layer.weight.to(dtype) for layer in plain])
    return functional.linear(x.to(dtype), weight, torch.cat(biases).to(dtype) if biases else None)


def _alike(*layers: nn.Module) -> tuple[list[Linear], torch.dtype | None]:
    """The layers and the dtype of their products, where all are plain ones of one dtype; else None."""
    plain = [layer for layer in layers if type(layer) is Linear and not layer.float8]
    dtypes = {layer.compute_dtype or layer.weight.dtype for layer in plain}
    return plain, dtypes.pop() if len(plain) == len(layers) and len(dtypes) == 1 else None


class _Products(torch.autograd.Function):
    """x W^T for several W on a CPU. Gradients of x are summed where they are made, and the weights' casts are not kept
    but made again: of a 26M model 45 MB less, for up to 4 % of the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *weights_ON: Tensor) -> tuple[Tensor, ...]:
        x_BN = arena.cast(x.reshape(-1, x.shape[-1]), dtype)
        ctx.save_for_backward(x_BN, *weights_ON)
        ctx.dtype, ctx.shape = x.dtype, x.shape
        return tuple(
            arena.product(x_BN, arena.cast(weight_ON, dtype).T).view(*x.shape[:-1], -1) for weight_ON in weights_ON
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x_BN, *weights_ON = ctx.saved_tensors
        grad_BN: Tensor | None = None
        grads_ON: list[Tensor | None] = [None] * len(weights_ON)
        for number, (weight_ON, each) in enumerate(zip(weights_ON, upstream, strict=True)):
            upstream_BO = each.reshape(len(x_BN), -1)
            if ctx.needs_input_grad[0]:
                matrix_ON = arena.cast(weight_ON, x_BN.dtype)
                if grad_BN is None:
                    grad_BN = arena.product(upstream_BO, matrix_ON)
                else:
                    torch.addmm(grad_BN, upstream_BO, matrix_ON, out=grad_BN)  # a counter of FLOPs knows no `addmm_`
            if ctx.needs_input_grad[2 + number]:
                grads_ON[number] = weight_slopes(upstream_BO, x_BN, weight_ON.dtype)
        grad_x = None if grad_BN is None else arena.cast(grad_BN, ctx.dtype).view(ctx.shape)
        return grad_x, None, *grads_ON


def weight_slopes(above_BO: Tensor, x_BN: Tensor, dtype: torch.dtype) -> Tensor:
    """above^T x in `dtype`: the gradient of a weight whose products are x W^T, above that of the products."""
    if dtype == torch.float32 and cpu.serves_weights(above_BO, x_BN):
        return cpu.weight_slopes(above_BO, x_BN)
    return arena.cast(arena.product(above_BO.T, x_BN), dtype)


def set_compute_dtype(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Set the dtype of every matrix product in `model`; the parameters stay as they are."""
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            setattr(module, "compute_dtype", dtype)  # noqa: B010 (typed as a tensor or a module by torch)


def use_float8(model: nn.Module) -> None:
    """Take the products of the linear layers of a decoder's blocks in float8 (kernels/fp8.py) where gradients are.

    Embedding, head and routers stay as they are, and so do routed experts and layers with a side that is no multiple
    of 16. `compute_dtype` must be bfloat16.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.startswith("blocks."):
            module.float8 = fits_float8(module.in_features, module.out_features)
