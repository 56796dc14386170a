"""Grouped-query attention (arXiv:1706.03762, equation 1; arXiv:2305.13245): softmax(q k^T / sqrt(K)) v, with rotary
positions, over packed rows: a position attends to the past of its own document only."""

from functools import partial

from torch import Tensor, nn

from penjing.kernels import ops
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear, shared_input_linears
from penjing.model.norm import RMSNorm


class Attention(nn.Module):
    """q = rope(norm(x Wq)), k = rope(norm(x Wk)), v = x Wv; out = (softmax(q k^T / sqrt(K)) v) Wo. H query heads in
    groups of H / G share a key/value head. The norms and biases of q, k and v depend on the architecture."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_attention_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        bias, keys = config.has_qkv_bias, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        normalised = config.normalises_heads
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normalised else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if normalised else nn.Identity()

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: ops.AttentionMetadata,
        cache: Cache | None = None,
        position_BT: Tensor | None = None,
    ) -> Tensor:
        """x_BTD -> x_BTD. rotary: see `rotary_table`; metadata: which keys each query attends to. With a cache,
        attention is over all its positions, and these T tokens are written at `position_BT`."""
        qkv = shared_input_linears(x_BTD, self.q_proj, self.k_proj, self.v_proj, consumer=metadata)
        heads = self.num_attention_heads, self.num_key_value_heads
        out_BTHK = ops.fused_attention(qkv, *heads, self._qk_norm(), rotary, metadata)
        if out_BTHK is None:
            write = None if cache is None or position_BT is None else partial(cache.write, self.layer, position_BT)
            out_BTHK = self._attend(ops.split_heads(qkv, *heads), rotary, metadata, write)
        out_BTD: Tensor = self.o_proj(out_BTHK.flatten(2))
        return out_BTD

    def _attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        rotary: tuple[Tensor, Tensor],
        metadata: ops.AttentionMetadata,
        write: ops.CacheWrite | None,
    ) -> Tensor:
        """out_BTHK, where no kernel computes all three lines."""
        q_BTHK, k_BTGK, v_BTGK = heads
        q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = ops.apply_rope(q_BTHK, *rotary), ops.apply_rope(k_BTGK, *rotary)
        return ops.attention(q_BTHK, k_BTGK, v_BTGK, metadata, write)

    def _qk_norm(self) -> ops.QKNorm | None:
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return ops.QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.epsilon)
        return None
