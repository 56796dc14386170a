"""Grouped-query attention (arXiv:2305.13245) over packed rows: a position sees its own document's past and no more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.document_attention import Lot, find_lots, has_varlen, tiled_attention, varlen_attention
from penjing.kernels.triton import ops as gpu
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear, joined, linears
from penjing.model.norm import RMSNorm
from penjing.model.rope import rotate


def document_mask(document_BT: Tensor, window: int = 0) -> Tensor:
    """mask_B1TS, True where query T may look at key S: not later, in its document, within the window (0: none)."""
    same_BTS = document_BT[:, :, None] == document_BT[:, None, :]
    return (same_BTS & _causal(document_BT.shape[1], window, document_BT.device))[:, None]


def branch_mask(document_BT: Tensor, branch_BT: Tensor, position_BT: Tensor, window: int = 0) -> Tensor:
    """mask_B1TS for documents that part into branches after a common beginning, which is branch 0.

    A query sees the common beginning and its own branch, up to itself; windows are measured in positions, as the
    branches stand one after another in the row but each goes on where the beginning ends.
    """
    same_BTS = document_BT[:, :, None] == document_BT[:, None, :]
    same_BTS &= (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
    if window:
        same_BTS &= position_BT[:, :, None] - position_BT[:, None, :] < window
    return (same_BTS & _causal(document_BT.shape[1], 0, document_BT.device))[:, None]


def window_mask(num_tokens: int, window: int, device: torch.device) -> Tensor:
    """mask_11TS of rows that are one document each, where a query sees `window` keys, its own included."""
    return _causal(num_tokens, window, device)[None, None]


def _causal(num_tokens: int, window: int, device: torch.device) -> Tensor:
    mask_TS = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    return mask_TS.triu(1 - window) if window else mask_TS


def cache_mask(position_BT: Tensor, max_tokens: int, window: int = 0) -> Tensor:
    """mask_B1TS for cached keys: True where key S stands at or before the query's position, within the window."""
    key_S = torch.arange(max_tokens, device=position_BT.device)
    mask_BTS = key_S <= position_BT[..., None]
    if window:
        mask_BTS &= key_S > position_BT[..., None] - window
    return mask_BTS[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which keys the queries of layers with one window may look at, in the form that the device's kernel wants.

    Nothing set: each row is one document, of which a query sees the past.
    """

    mask_B1TS: Tensor | None = None  # for the plain kernel, and for documents that branch
    document_BT: Tensor | None = None  # for `tiled_attention`
    lots: list[Lot] | None = None
    first_BT: Tensor | None = None  # for our own kernel on a CPU
    edges: tuple[Tensor, Tensor] | None = None  # for `gpu.heads_and_attention`
    edge_S: Tensor | None = None  # for `varlen_attention`
    window: int = 0


def sight(
    position_BT: Tensor,
    document_BT: Tensor | None,
    branch_BT: Tensor | None,
    edge_S: Tensor | None,
    cache: Cache | None,
    window: int,
    config: ModelConfig,
    dtype: torch.dtype,
) -> Sight:
    """What the layers with this window see. dtype: of queries and keys; see `Transformer.hidden` for the rest."""
    head_size = config.head_size
    num_tokens, device = position_BT.shape[1], position_BT.device
    if cache is not None:
        return Sight(mask_B1TS=cache_mask(position_BT, cache.max_tokens, window))
    if document_BT is None:
        cut = 0 < window < num_tokens
        return Sight(mask_B1TS=window_mask(num_tokens, window, device) if cut else None)
    if branch_BT is None and gpu.serves_attention(device, dtype, head_size) and not torch.compiler.is_exporting():
        return Sight(edges=gpu.document_edges(document_BT, window))
    if branch_BT is None and edge_S is not None and has_varlen(device, dtype, head_size, window):
        return Sight(edge_S=edge_S, window=window)
    on_cpu = device.type == "cpu" and not torch.compiler.is_exporting()  # other programs have no tiles
    mask_B1TS = None
    if branch_BT is not None:
        mask_B1TS, window = branch_mask(document_BT, branch_BT, position_BT, window), 0
    elif not on_cpu:
        mask_B1TS = document_mask(document_BT, window)
    if not on_cpu:
        return Sight(mask_B1TS=mask_B1TS)
    if mask_B1TS is None and cpu.serves_attention(dtype, head_size, len(document_BT) * config.num_kv_heads):
        return Sight(document_BT=document_BT, first_BT=cpu.first_keys(document_BT, window), window=window)
    lots = None if torch.compiler.is_compiling() else find_lots(document_BT, mask_B1TS, window, dtype)
    return Sight(mask_B1TS=mask_B1TS, document_BT=document_BT, lots=lots, window=window)


def plain_attention(q_BTHK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask_B1TS: Tensor | None) -> Tensor:
    """mixed_BTHK; the reference of the other kernels. mask_B1TS: None means causal over the T positions."""
    mixed_BHTK = functional.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BGSK,
        v_BGSK,
        attn_mask=mask_B1TS,
        is_causal=mask_B1TS is None,
        enable_gqa=q_BTHK.shape[2] != k_BGSK.shape[1],
    )
    return mixed_BHTK.transpose(1, 2)


def attend(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, rotary: tuple[Tensor, Tensor], seen: Sight) -> Tensor:
    """mixed_BTHK = softmax(q k^T / sqrt(K)) v over what is seen, with q and k turned by `rotary` first."""
    if seen.document_BT is not None:
        given = (seen.document_BT, seen.mask_B1TS, seen.window, seen.lots, rotary, seen.first_BT)
        return tiled_attention(q_BTHK, k_BTGK, v_BTGK, *given)
    q_BTHK, k_BTGK = rotate(q_BTHK, *rotary), rotate(k_BTGK, *rotary)
    if seen.edge_S is not None:
        return varlen_attention(q_BTHK, k_BTGK, v_BTGK, seen.edge_S, q_BTHK.shape[1], seen.window)
    return plain_attention(q_BTHK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), seen.mask_B1TS)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(K)) v with rotary positions; query and key heads may be normalised or biased first."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.head_size
        bias, keys = config.has_qkv_bias, config.num_kv_heads * config.head_size
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_size, bias=bias)
        self.k_proj = Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = Linear(config.num_heads * config.head_size, config.hidden_size)
        normalised = config.normalises_heads
        self.q_norm = RMSNorm(config.head_size, config.norm_epsilon) if normalised else nn.Identity()
        self.k_norm = RMSNorm(config.head_size, config.norm_epsilon) if normalised else nn.Identity()

    def match_keys_to_queries(self) -> None:
        """Copy into each key head the first of the query heads that it serves, so that like attends to like."""
        q_GRKD = self.q_proj.weight.view(self.num_kv_heads, -1, self.head_size, self.q_proj.in_features)
        self.k_proj.weight.copy_(q_GRKD[:, 0].flatten(0, 1))

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        seen: Sight,
        cache: Cache | None = None,
        position_BT: Tensor | None = None,
    ) -> Tensor:
        """x_BTD -> x_BTD. rotary: `rotary_table` of the positions; seen: `sight` of them.

        With a cache, keys run over all its positions and `position_BT` says where these T tokens are written.
        """
        rows, num_tokens, _ = x_BTD.shape
        if seen.edges is not None:
            return self._on_gpu(x_BTD, rotary, seen.edges)
        q_BTHK, k_BTGK, v_BTGK = (
            each.view(rows, num_tokens, -1, self.head_size)
            for each in linears(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        )
        q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if cache is None:
            mixed_BTHK = attend(q_BTHK, k_BTGK, v_BTGK, rotary, seen)
        else:
            assert position_BT is not None
            q_BTHK, k_BTGK = rotate(q_BTHK, *rotary), rotate(k_BTGK, *rotary)
            k_BGSK, v_BGSK = cache.write(self.layer, position_BT, k_BTGK, v_BTGK)
            mixed_BTHK = plain_attention(q_BTHK, k_BGSK.to(q_BTHK.dtype), v_BGSK.to(q_BTHK.dtype), seen.mask_B1TS)
        out_BTD: Tensor = self.o_proj(mixed_BTHK.reshape(rows, num_tokens, -1))
        return out_BTD

    def _on_gpu(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], edges: tuple[Tensor, Tensor]) -> Tensor:
        gains, epsilon = None, 0.0
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            gains, epsilon = (self.q_norm.weight, self.k_norm.weight), self.q_norm.epsilon
        joined_BTJ = joined(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        mixed_BTHK = gpu.heads_and_attention(
            joined_BTJ, gains, epsilon, rotary, edges, self.num_heads, self.num_kv_heads
        )
        out_BTD: Tensor = self.o_proj(mixed_BTHK.flatten(2))
        return out_BTD
