"""The feed-forward half of a block: SwiGLU (arXiv:2002.05202), down(silu(gate x) * up x)."""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor, nn

from penjing.model.config import ModelConfig
from penjing.model.linear import Linear


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
        inner_BTF = functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        out_BTD: Tensor = self.down_proj(inner_BTF)
        return out_BTD
