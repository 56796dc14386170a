"""The feed-forward half of a block: SwiGLU (arXiv:2002.05202), down(silu(gate x) * up x)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.chunking import PIECE, pieces
from penjing.kernels.triton import ops as gpu
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear, joined, linears, weight_slopes


class MLP(nn.Module):
    """x_BTD -> x_BTD through an inner width F."""

    def __init__(self, config: ModelConfig, size: int = 0) -> None:
        """size: F; 0 = the configuration's `mlp_size`."""
        super().__init__()
        size = size or config.mlp_size
        self.gate_proj = Linear(config.hidden_size, size)
        self.up_proj = Linear(config.hidden_size, size)
        self.down_proj = Linear(size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # Writing answers, where passes are of few tokens, matrices are not put together anew for each.
        if torch.is_grad_enabled() and gpu.serves(x_BTD.device, self.down_proj.compute_dtype):
            y_BTD: Tensor = self.down_proj(gpu.gated(joined(x_BTD, self.gate_proj, self.up_proj)))
            return y_BTD
        (gate, up), down = linears(x_BTD, self.gate_proj, self.up_proj), self.down_proj
        if type(down) is Linear and not down.float8 and arena.serves(gate):  # there is no bias
            return _GatedDown.apply(gate, up, down.weight)  # type: ignore[no-any-return,no-untyped-call]
        out_BTD: Tensor = down(gated(gate, up))
        return out_BTD


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if arena.by_hand(gate):
        return _Gated.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]
    return functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    """The same, silu(gate) not being kept for the backward pass and no pass made over more than a cache holds."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _inner(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return _slopes(upstream[0].contiguous(), *ctx.saved_tensors)


class _GatedDown(torch.autograd.Function):
    """(silu(gate) * up) W^T, in the dtype of gate and up. What stands in the brackets is not kept but made again, and
    so is the weight's cast."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight_DF)
        inner_BF = _inner(gate, up).flatten(0, -2)
        return arena.product(inner_BF, arena.cast(weight_DF, gate.dtype).T).view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up, weight_DF), grad_gate, grad_up, grad_weight_DF = ctx.saved_tensors, None, None, None
        upstream_BD = upstream[0].flatten(0, -2)
        if all(ctx.needs_input_grad) and cpu.serves(gate, up, upstream_BD):
            above = arena.product(upstream_BD, arena.cast(weight_DF, gate.dtype)).view(gate.shape)
            grad_gate, grad_up, inner = cpu.gated_slopes(above, gate, up, remade=True)
            assert inner is not None
            grad_weight_DF = weight_slopes(upstream_BD, inner.flatten(0, -2), weight_DF.dtype)
            return grad_gate, grad_up, grad_weight_DF
        if ctx.needs_input_grad[2]:
            inner_BF = _inner(gate, up).flatten(0, -2)
            grad_weight_DF = weight_slopes(upstream_BD, inner_BF, weight_DF.dtype)
            del inner_BF
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_inner_BF = arena.product(upstream_BD, arena.cast(weight_DF, gate.dtype))
            grad_gate, grad_up = _slopes(grad_inner_BF.view(gate.shape), gate, up)
        return grad_gate, grad_up, grad_weight_DF


def _inner(gate: Tensor, up: Tensor) -> Tensor:
    if cpu.serves(gate, up) and gate.dtype == up.dtype:
        return cpu.gated(gate, up)
    inner = arena.empty_like(gate)
    for inner_C, gate_C, up_C in pieces(inner, gate, up):
        torch.ops.aten.silu.out(gate_C, out=inner_C).mul_(up_C)
    return inner


def _slopes(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    if cpu.serves(upstream, gate, up) and upstream.dtype == gate.dtype == up.dtype:
        return cpu.gated_slopes(upstream, gate, up)[:2]
    grad_gate, grad_up = arena.empty_like(gate), arena.empty_like(up)
    room_C = arena.empty(gate, (min(PIECE, gate.numel()),), gate.dtype)
    for grad_gate_C, grad_up_C, upstream_C, gate_C, up_C in pieces(grad_gate, grad_up, upstream, gate, up):
        torch.ops.aten.silu.out(gate_C, out=grad_up_C).mul_(upstream_C)
        slope_C = torch.mul(upstream_C, up_C, out=room_C[: len(gate_C)])
        torch.ops.aten.silu_backward.grad_input(slope_C, gate_C, grad_input=grad_gate_C)
    return grad_gate, grad_up
