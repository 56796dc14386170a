"""Which keys each query attends to: as a mask, as key ranges, or in the form that the selected kernel takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu.ops import TILE
from penjing.kernels.tiled_attention import TileGroup, group_tiles
from penjing.kernels.triton import ops as gpu
from penjing.kernels.varlen_attention import supports_varlen


def document_mask(document_BT: Tensor, window: int = 0) -> Tensor:
    """mask_B1TS, True where query T attends to key S: not later, same document, within the window (0: no window)."""
    same_BTS = document_BT[:, :, None] == document_BT[:, None, :]
    return (same_BTS & _causal(document_BT.shape[1], window, document_BT.device))[:, None]


def branch_mask(document_BT: Tensor, branch_BT: Tensor, position_BT: Tensor, window: int = 0) -> Tensor:
    """mask_B1TS for documents that branch after a shared prefix, which is branch 0.

    A query attends to the prefix and its own branch, up to itself. Windows are measured in positions: branches are one
    after another in the row, but the positions of each continue from the end of the prefix.
    """
    same_BTS = document_BT[:, :, None] == document_BT[:, None, :]
    same_BTS &= (branch_BT[:, None, :] == 0) | (branch_BT[:, :, None] == branch_BT[:, None, :])
    if window:
        same_BTS &= position_BT[:, :, None] - position_BT[:, None, :] < window
    return (same_BTS & _causal(document_BT.shape[1], 0, document_BT.device))[:, None]


def _causal(num_tokens: int, window: int, device: torch.device) -> Tensor:
    mask_TS = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    return mask_TS.triu(1 - window) if window else mask_TS


def cache_mask(position_BT: Tensor, max_tokens: int, window: int = 0) -> Tensor:
    """mask_B1TS for cached keys: True where key S is at or before the query's position, within the window."""
    key_S = torch.arange(max_tokens, device=position_BT.device)
    mask_BTS = key_S <= position_BT[..., None]
    if window:
        mask_BTS &= key_S > position_BT[..., None] - window
    return mask_BTS[:, None]


def additive_mask(mask_B1TS: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is True, else -inf: torch's attention would make it from the mask again in every layer."""
    return torch.zeros_like(mask_B1TS, dtype=dtype).masked_fill_(~mask_B1TS, -torch.inf)


def key_ranges(document_BT: Tensor, window: int = 0) -> tuple[Tensor, Tensor]:
    """first_BT, last_BT, int32: each position's first key, and one past the last query that attends to it.

    Equal neighbours in document_BT are one document; a window limits the number of keys.
    """
    position_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    new_BT = functional.pad(document_BT[:, 1:] != document_BT[:, :-1], (1, 0), value=True)
    first_BT = torch.where(new_BT, position_T, 0).cummax(dim=1).values
    ends_BT = torch.where(new_BT.roll(-1, dims=1), position_T + 1, len(position_T))
    last_BT = ends_BT.flip(1).cummin(dim=1).values.flip(1)
    if window:
        first_BT = first_BT.maximum(position_T + 1 - window)
        last_BT = last_BT.minimum(position_T + window)
    return first_BT.int(), last_BT.int()


def first_keys(document_BT: Tensor, window: int) -> Tensor:
    """first_BT of `key_ranges`, rows padded to full tiles with positions that attend to themselves only."""
    num_tokens = document_BT.shape[1]
    first_BT, _ = key_ranges(functional.pad(document_BT, (0, -num_tokens % TILE)), window)
    position_T = torch.arange(first_BT.shape[1], dtype=torch.int32)
    return torch.where(position_T < num_tokens, first_BT, position_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Which keys the queries of layers with this window attend to, in the form that the selected kernel takes.

    Nothing set: each row is one document, and attention is causal (torch's attention).
    """

    mask_B1TS: Tensor | None = None  # for torch's attention (also additive), and for branching documents
    document_BT: Tensor | None = None  # for `tiled_attention`
    groups: list[TileGroup] | None = None
    first_BT: Tensor | None = None  # for the C kernel
    ranges: tuple[Tensor, Tensor] | None = None  # for the Triton kernel
    cu_seqlens_S: Tensor | None = None  # for `varlen_attention`
    window: int = 0

    @property
    def packed(self) -> bool:
        """Whether the kernel takes queries, keys and values concatenated in one tensor."""
        return self.ranges is not None


def make_attention_metadata(
    position_BT: Tensor,
    document_BT: Tensor | None,
    *,
    heads: tuple[int, int],
    dtype: torch.dtype,
    window: int = 0,
    branch_BT: Tensor | None = None,
    cu_seqlens_S: Tensor | None = None,
    cache_tokens: int = 0,
) -> AttentionMetadata:
    """Select the attention kernel for layers with this window, and make its inputs.

    position_BT, document_BT, branch_BT: of each token (see `branch_mask`). heads: number of key heads, and the
    dimensions of each. dtype: of queries and keys. cu_seqlens_S: see `cu_seqlens`. cache_tokens: length of the
    key/value cache; 0: none.
    """
    num_key_value_heads, head_dim = heads
    num_tokens, device = position_BT.shape[1], position_BT.device
    if cache_tokens:
        allowed_B1TS = cache_mask(position_BT, cache_tokens, window)
        is_additive = device.type == "cuda"
        return AttentionMetadata(mask_B1TS=additive_mask(allowed_B1TS, dtype) if is_additive else allowed_B1TS)
    if document_BT is None:
        is_windowed = 0 < window < num_tokens
        return AttentionMetadata(mask_B1TS=_causal(num_tokens, window, device)[None, None] if is_windowed else None)
    if branch_BT is None and gpu.supports_attention(device, dtype, head_dim) and not torch.compiler.is_exporting():
        return AttentionMetadata(ranges=key_ranges(document_BT, window))
    if branch_BT is None and cu_seqlens_S is not None and supports_varlen(device, dtype, head_dim):
        return AttentionMetadata(cu_seqlens_S=cu_seqlens_S, window=window)
    on_cpu = device.type == "cpu" and not torch.compiler.is_exporting()  # an exported program has no tiles
    mask_B1TS = None
    if branch_BT is not None:
        mask_B1TS, window = branch_mask(document_BT, branch_BT, position_BT, window), 0
    elif not on_cpu:
        mask_B1TS = document_mask(document_BT, window)
    if not on_cpu:
        return AttentionMetadata(mask_B1TS=mask_B1TS)
    if mask_B1TS is None and cpu.supports_attention(dtype, head_dim, len(document_BT) * num_key_value_heads):
        return AttentionMetadata(document_BT=document_BT, first_BT=first_keys(document_BT, window), window=window)
    groups = None if torch.compiler.is_compiling() else group_tiles(document_BT, mask_B1TS, window, dtype)
    return AttentionMetadata(mask_B1TS=mask_B1TS, document_BT=document_BT, groups=groups, window=window)
