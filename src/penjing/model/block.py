"""One decoder block (pre-norm, arXiv:2002.04745): x + attention(norm(x)), then x + mlp(norm(x))."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penjing.kernels import ops
from penjing.model.attention import Attention
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.mlp import MLP
from penjing.model.moe import MoELayer, RouterStats
from penjing.model.norm import RMSNorm
from penjing.model.regularization import BranchNoise


class Block(nn.Module):
    """x_BTD -> x_BTD, and the router's statistics in an MoE layer."""

    recompute_mlp: bool = False  # whether the MLP's activations are recomputed in the backward pass instead of kept

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config) if config.is_dense_layer(layer) else MoELayer(config)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: ops.AttentionMetadata,
        cache: Cache | None = None,
        position_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        noise: BranchNoise = BranchNoise(),
    ) -> tuple[Tensor, RouterStats | None]:
        x_BTD, normal_BTD = self.input_norm.forward_with_residual(x_BTD)
        out_BTD = noise.drop(self.attention(normal_BTD, rotary, metadata, cache, position_BT), 0)
        x_BTD = ops.residual_add(x_BTD, out_BTD)
        if self.recompute_mlp and torch.is_grad_enabled() and not isinstance(self.mlp, MoELayer):
            out_BTD = checkpoint(
                lambda x: self.mlp(self.mlp_norm(x)), x_BTD, use_reentrant=False, preserve_rng_state=False
            )
            return x_BTD + noise.drop(out_BTD, 1), None
        x_BTD, normal_BTD = self.mlp_norm.forward_with_residual(x_BTD)
        if isinstance(self.mlp, MoELayer):
            out_BTD, router = self.mlp(normal_BTD, document_BT)
            return ops.residual_add(x_BTD, noise.drop(out_BTD, 1)), router
        return ops.residual_add(x_BTD, noise.drop(self.mlp(normal_BTD), 1)), None
