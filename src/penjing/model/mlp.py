"""The feed-forward half of a block: SwiGLU (arXiv:2002.05202), down(silu(gate x) * up x)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.model.config import ModelConfig
from penjing.model.linear import Linear
from penjing.model.pieces import pieces


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
        out_BTD: Tensor = self.down_proj(gated(self.gate_proj(x_BTD), self.up_proj(x_BTD)))
        return out_BTD


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    if gate.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Gated.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]
    return functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    """The same, silu(gate) not being kept for the backward pass and no pass made over more than a cache holds."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        inner = torch.empty_like(gate)
        for out_C, gate_C, up_C in pieces(inner, gate, up):
            torch.mul(functional.silu(gate_C), up_C, out=out_C)
        return inner

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        parts = pieces(grad_gate, grad_up, upstream[0].contiguous(), gate, up)
        for grad_gate_C, grad_up_C, upstream_C, gate_C, up_C in parts:
            torch.mul(upstream_C, functional.silu(gate_C), out=grad_up_C)
            grad_gate_C.copy_(torch.ops.aten.silu_backward(upstream_C * up_C, gate_C))
        return grad_gate, grad_up
