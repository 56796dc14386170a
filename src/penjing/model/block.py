"""One decoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.model.attention import Attention, Sight
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.mlp import MLP
from penjing.model.moe import Mixture, RouterMeans
from penjing.model.norm import RMSNorm


class Block(nn.Module):
    """x_BTD -> x_BTD, and in a layer of experts what its router did."""

    recompute_mlp: bool = False  # whether the MLP's activations are made again in the backward pass instead of kept

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config) if config.is_dense_layer(layer) else Mixture(config)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        seen: Sight,
        cache: Cache | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
    ) -> tuple[Tensor, RouterMeans | None]:
        x_BTD, normal_BTD = self.input_norm.beside(x_BTD)
        x_BTD = added(x_BTD, self.attention(normal_BTD, rotary, seen, cache, position_BT))
        if self.recompute_mlp and torch.is_grad_enabled() and not isinstance(self.mlp, Mixture):
            return x_BTD + checkpoint(
                lambda x: self.mlp(self.mlp_norm(x)), x_BTD, use_reentrant=False, preserve_rng_state=False
            ), None
        x_BTD, normal_BTD = self.mlp_norm.beside(x_BTD)
        if isinstance(self.mlp, Mixture):
            out_BTD, router = self.mlp(normal_BTD, document_BT)
            return added(x_BTD, out_BTD), router
        return added(x_BTD, self.mlp(normal_BTD)), None


def added(x: Tensor, y: Tensor) -> Tensor:
    """x + y."""
    if arena.serves(x) or (arena.by_hand(x) and cpu.serves(y, wide=[x])):
        return _Added.apply(x, y)  # type: ignore[no-any-return,no-untyped-call]
    return x + y


class _Added(torch.autograd.Function):
    """The same without a copy of one in the other's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.dtypes = x.dtype, y.dtype
        if cpu.serves(y, wide=[x]):
            return cpu.add(x, y, arena.empty_like(x))
        return arena.empty(x, x.shape, torch.promote_types(x.dtype, y.dtype)).copy_(y).add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x_dtype, y_dtype = ctx.dtypes
        return arena.cast(upstream[0], x_dtype), arena.cast(upstream[0], y_dtype)
