"""Which keys each query attends to: as a mask, as key ranges, or in the form that the selected kernel takes."""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels.select import find

TILE = 64  # queries, and keys, of one attention tile
Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [B or 1, T, 1, n]


def document_mask(document_BT: Tensor, window: int = 0) -> Tensor:
    """mask_B1TS, True where query T attends to key S: not later, same document, within the window (0: no window)."""
    same_BTS = document_BT[:, :, None] == document_BT[:, None, :]
    return (same_BTS & _causal(document_BT.shape[1], window, document_BT.device))[:, None]


def tree_mask(subtree_end_BT: Tensor, position_BT: Tensor, window: int = 0) -> Tensor:
    """mask_B1TS for rows that hold trees in depth-first order: a query attends to its ancestors and itself.

    subtree_end_BT: one past the last descendant of each token. Windows are measured in positions, the depths in a tree.
    """
    query_T = torch.arange(subtree_end_BT.shape[1], device=subtree_end_BT.device)
    mask_BTS = query_T[:, None] < subtree_end_BT[:, None, :]
    if window:
        mask_BTS &= position_BT[:, :, None] - window < position_BT[:, None, :]
    return (mask_BTS & _causal(len(query_T), 0, query_T.device))[:, None]


def causal_mask(position_BT: Tensor, window: int) -> Tensor:
    """mask_B1TS of rows of one document."""
    return _causal(position_BT.shape[1], window, position_BT.device)[None, None]


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
    """first_BT, last_BT, int32: each position's first key, and one past the last query that attends to it. Equal
    neighbours in document_BT are one document; a window limits the number of keys."""
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
    """Which keys the queries of layers with this window attend to, in the form that the selected backend takes. Nothing
    set: each row is one document, and attention is causal (torch's attention)."""

    backend: str = "torch"  # its row in BACKENDS
    mask_B1TS: Tensor | None = None  # for torch's attention (also additive), and for trees
    document_BT: Tensor | None = None  # for tiles
    groups: list[Any] | None = None
    first_BT: Tensor | None = None  # for the C kernel
    subtree_end_BT: Tensor | None = None  # with `first_BT`, for trees
    ranges: tuple[Tensor, Tensor] | None = None  # for the Triton kernel
    cu_seqlens_S: Tensor | None = None  # for `varlen_attention`
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """What decides on the backend of attention.

    position_BT, document_BT, subtree_end_BT: of each token (see `tree_mask`). heads: number of key heads, and the
    dimensions of each. dtype: of queries and keys. cu_seqlens_S: see loader/batch.py. cache_tokens: length of the
    key/value cache; 0: none.
    """

    position_BT: Tensor
    document_BT: Tensor | None = None
    heads: tuple[int, int]
    dtype: torch.dtype
    window: int = 0
    subtree_end_BT: Tensor | None = None
    cu_seqlens_S: Tensor | None = None
    cache_tokens: int = 0

    @property
    def device(self) -> torch.device:
        return self.position_BT.device

    def plain_documents(self) -> Tensor | None:
        """document_BT of packed rows, without cache and trees, for kernels that take nothing else."""
        others = self.cache_tokens or self.subtree_end_BT is not None or torch.compiler.is_exporting()
        return None if others else self.document_BT


def make_attention_metadata(**inputs: Any) -> AttentionMetadata:
    """Select the attention backend for layers with one window, and make its inputs. inputs: of `AttentionInputs`."""
    asked = AttentionInputs(**inputs)
    return cast(AttentionMetadata, find("attention_metadata", asked)(asked))


class QKNorm(NamedTuple):
    """RMSNorm of each query and key head: gains and epsilon."""

    q_gain_K: Tensor
    k_gain_K: Tensor
    epsilon: float


def split_heads(qkv: tuple[Tensor, ...], num_heads: int, num_key_value_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q_BTHK, k_BTGK, v_BTGK of three tensors [B, T, heads x K]."""
    counts, (rows, num_tokens, width) = (num_heads, num_key_value_heads, num_key_value_heads), qkv[0].shape
    q_BTHK, k_BTGK, v_BTGK = (
        x.view(rows, num_tokens, count, width // num_heads) for x, count in zip(qkv, counts, strict=True)
    )
    return q_BTHK, k_BTGK, v_BTGK


def normalised_heads(
    qkv: tuple[Tensor, ...], num_heads: int, num_key_value_heads: int, norm: QKNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`split_heads`, with an RMSNorm of each query and key head."""
    heads = split_heads(qkv, num_heads, num_key_value_heads)
    if norm is None:
        return heads
    normalised = [
        find("rms_norm_with_residual", x)(x, gain_K, norm.epsilon, x.dtype)[1]
        for x, gain_K in zip(heads, norm[:2], strict=False)
    ]
    return normalised[0], normalised[1], heads[2]
