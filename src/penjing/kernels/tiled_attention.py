"""Attention over packed rows on a CPU, document by document: few keys of other documents are computed.

Queries are in tiles of 64 positions. A tile needs the tiles of keys from the start of its first query's document to its
own end; tiles that need equally many are batched in one matmul. Scores are rounded to the matmuls' dtype before the
softmax, as in an eager `transformers` model. The reference is `reference.attention` with a mask.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels import reference
from penjing.kernels.attention_metadata import (
    TILE,
    AttentionInputs,
    AttentionMetadata,
    QKNorm,
    Rotary,
    document_mask,
    normalised_heads,
    tree_mask,
)
from penjing.kernels.autograd_functions import apply_rope
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.select import find

# Matrices of one batched matmul: oneDNN compiles each new GEMM shape and keeps 0.5 MiB for it.
BATCHES = (8, 2, 1)
MIN_MATRIX = 1 << 14  # values; smaller matrices go through one matmul, as call overhead would dominate
# Tiles with up to this many keys save their probabilities for the backward pass (2 x H x keys bytes per token in
# bfloat16). Others recompute them: attention takes a third longer, and memory is linear in tokens.
MAX_KEPT_KEYS = 256


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of queries that need equally many tiles of keys. Tiles are numbered over all rows."""

    tile_N: Tensor  # of queries
    key_tile_NM: Tensor  # the M tiles of keys of each
    bias_NTS: Tensor  # 0 for visible keys, -inf for masked ones; T positions of a tile, S = M x T
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def key_tile_indices(self, num_groups: int) -> Tensor:
        """The indices of the needed key tiles of all heads, N x G x M; cached, as every layer uses the same."""
        if num_groups not in self._indices:
            group_G1 = torch.arange(num_groups)[:, None]
            self._indices[num_groups] = (self.key_tile_NM[:, None] * num_groups + group_G1).flatten()
        return self._indices[num_groups]


def group_tiles(document_BT: Tensor, mask_B1TS: Tensor | None, window: int, dtype: torch.dtype) -> list[TileGroup]:
    """Group query tiles by the number of key tiles that they need. Equal neighbours in document_BT are one document.

    mask_B1TS: True where a query attends to a key, for trees; None: to its document's past, or the last
    `window` positions of it, its own included (0: all).
    """
    document_BT = functional.pad(document_BT, (0, -document_BT.shape[1] % TILE), value=-2)
    rows, num_tokens = document_BT.shape
    position_T, num_tiles = torch.arange(num_tokens), num_tokens // TILE
    is_start_BT = document_BT[:, 1:] != document_BT[:, :-1]
    start_BT = functional.pad(is_start_BT * position_T[1:], (1, 0)).cummax(dim=1).values
    first_key_BN = start_BT[:, ::TILE]
    if window:
        first_key_BN = first_key_BN.maximum(position_T[::TILE] + 1 - window)
    first_tile_N = (first_key_BN // TILE + torch.arange(rows)[:, None] * num_tiles).flatten()
    tile_N = torch.arange(rows * num_tiles)
    needed_N = tile_N - first_tile_N + 1
    tiles_NT, position_NT = document_BT.view(-1, TILE), position_T.repeat(rows).view(-1, TILE)
    groups = []
    for needed in sorted(set(needed_N.tolist())):
        group_N = (needed_N == needed).nonzero()[:, 0]
        key_tile_NM = first_tile_N[group_N, None] + torch.arange(needed)
        query_NT1, key_N1S = position_NT[group_N][:, :, None], position_NT[key_tile_NM].flatten(1)[:, None]
        masked_NTS = key_N1S > query_NT1
        if mask_B1TS is None:
            masked_NTS |= tiles_NT[group_N][:, :, None] != tiles_NT[key_tile_NM].flatten(1)[:, None]
            if window:
                masked_NTS |= key_N1S <= query_NT1 - window
        else:
            last = mask_B1TS.shape[-1] - 1  # padding positions attend to themselves only
            visible_NTS = mask_B1TS[
                group_N[:, None, None] // num_tiles, 0, query_NT1.clamp(max=last), key_N1S.clamp(max=last)
            ]
            masked_NTS |= torch.where((query_NT1 > last) | (key_N1S > last), query_NT1 != key_N1S, ~visible_NTS)
        bias_NTS = torch.zeros(masked_NTS.shape, dtype=dtype).masked_fill_(masked_NTS, -math.inf)
        groups.append(TileGroup(group_N, key_tile_NM, bias_NTS))
    return groups


def supports(op: str, asked: AttentionInputs | Any, *_: Any) -> str:
    """Why tiles are not used for these documents; empty: they are."""
    if op != "attention_metadata":
        return ""
    if asked.device.type != "cpu":
        return "for CPUs only"
    if asked.document_BT is None or asked.cache_tokens:
        return "for packed documents only"
    return "a compiled or exported program has no tiles" if torch.compiler.is_compiling() else ""


def attention_metadata(asked: AttentionInputs) -> AttentionMetadata:
    assert asked.document_BT is not None
    mask_B1TS, window = None, asked.window
    if asked.subtree_end_BT is not None:
        mask_B1TS, window = tree_mask(asked.subtree_end_BT, asked.position_BT, window), 0
    groups = group_tiles(asked.document_BT, mask_B1TS, window, asked.dtype)
    return AttentionMetadata(
        backend="torch, in tiles", mask_B1TS=mask_B1TS, document_BT=asked.document_BT, groups=groups, window=window
    )


def fused_attention(
    qkv: tuple[Tensor, ...],
    num_heads: int,
    num_key_value_heads: int,
    norm: QKNorm | None,
    rotary: Rotary | None,
    metadata: AttentionMetadata,
) -> Tensor:
    """Queries and keys are rotated on their way into tiles."""
    q_BTHK, k_BTGK, v_BTGK = normalised_heads(qkv, num_heads, num_key_value_heads, norm)
    assert metadata.document_BT is not None
    documents = metadata.document_BT, metadata.mask_B1TS, metadata.window, metadata.groups
    return tiled_attention(q_BTHK, k_BTGK, v_BTGK, *documents, rotary)


def tiled_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    document_BT: Tensor,
    mask_B1TS: Tensor | None = None,
    window: int = 0,
    groups: list[TileGroup] | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """out_BTHK = softmax(q k^T / sqrt(K)) v. groups: `group_tiles` of the three arguments before it, if known; rotary:
    cosines and sines, if q and k are not yet rotated."""
    rotates = find("tiles_of", q_BTHK, k_BTGK, v_BTGK, *(rotary or ())) is not tiles_of
    if rotary is not None and not rotates:
        q_BTHK, k_BTGK, rotary = apply_rope(q_BTHK, *rotary), apply_rope(k_BTGK, *rotary), None
    if torch.compiler.is_compiling():  # which tiles are needed depends on data, and no graph expresses that
        mask_B1TS = document_mask(document_BT, window) if mask_B1TS is None else mask_B1TS
        return reference.masked_attention(q_BTHK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), mask_B1TS)
    if groups is None:
        groups = group_tiles(document_BT, mask_B1TS, window, q_BTHK.dtype)
    return _TiledAttention.apply(q_BTHK, k_BTGK, v_BTGK, groups, rotary)  # type: ignore[no-any-return,no-untyped-call]


def tiles_of(x_BTHK: Tensor, rotary: None = None) -> Tensor:
    """[tiles of all rows, H, tile, K]; rows are padded to full tiles with zeros."""
    missing = -x_BTHK.shape[1] % TILE
    x_BTHK = functional.pad(x_BTHK, (0, 0, 0, 0, 0, missing)) if missing else x_BTHK
    num_heads, size = x_BTHK.shape[2:]
    tile_NHTK = x_BTHK.reshape(-1, TILE, num_heads, size).transpose(1, 2)
    return arena.empty_like(tile_NHTK).copy_(tile_NHTK)


def rows_of(x_NHTK: Tensor, num_tokens: int, dtype: torch.dtype, rotary: None = None) -> Tensor:
    """The inverse of `tiles_of`: rows of `num_tokens` positions."""
    rows, (num_heads, _, size) = len(x_NHTK) // -(-num_tokens // TILE), x_NHTK.shape[1:]
    tile_NTHK = x_NHTK.transpose(1, 2)
    tile_NTHK = arena.empty(tile_NTHK, tile_NTHK.shape, dtype).copy_(tile_NTHK)
    return tile_NTHK.view(rows, -1, num_heads, size)[:, :num_tokens]


def _to_tiles(x_BTHK: Tensor, num_groups: int, rotary: Rotary | None = None) -> Tensor:
    """[tiles of all rows, G, H / G x tile, K]."""
    x_NHTK = find("tiles_of", x_BTHK)(x_BTHK, rotary)
    return x_NHTK.view(len(x_NHTK), num_groups, -1, x_BTHK.shape[-1])


def _to_rows(tile_NGQK: Tensor, num_tokens: int, dtype: torch.dtype, rotary: Rotary | None = None) -> Tensor:
    x_NHTK = tile_NGQK.view(len(tile_NGQK), -1, TILE, tile_NGQK.shape[-1])
    return find("rows_of", tile_NGQK, dtype)(x_NHTK, num_tokens, dtype, rotary)


def _gather_queries(tile_NGQK: Tensor, group: TileGroup) -> Tensor:
    """[N x G, Q, K]: the query heads that share a key head are concatenated; Q is their number times the tile."""
    buffer = arena.empty(tile_NGQK, (len(group.tile_N), *tile_NGQK.shape[1:]), tile_NGQK.dtype)
    return torch.index_select(tile_NGQK, 0, group.tile_N, out=buffer).flatten(0, 1)


def _gather_keys(tile_NGTK: Tensor, group: TileGroup) -> Tensor:
    """[N x G, S, K]."""
    num_groups, size = tile_NGTK.shape[1], tile_NGTK.shape[-1]
    index = group.key_tile_indices(num_groups)
    buffer = arena.empty(tile_NGTK, (len(index), *tile_NGTK.shape[2:]), tile_NGTK.dtype)
    return torch.index_select(tile_NGTK.flatten(0, 1), 0, index, out=buffer).view(
        len(group.tile_N) * num_groups, -1, size
    )


def _scatter_add_keys(into_NGTK: Tensor, group: TileGroup, value: Tensor) -> None:
    """The adjoint of `_gather_keys`; several query tiles may need one key tile."""
    index = group.key_tile_indices(into_NGTK.shape[1])
    find("add_tiles", value, into_NGTK)(into_NGTK.flatten(0, 1), index, value)


def add_tiles(into_MTK: Tensor, index_N: Tensor, value: Tensor) -> None:
    """into[index] += value."""
    into_MTK.index_add_(0, index_N, arena.cast(value, into_MTK.dtype).view(-1, *into_MTK.shape[1:]))


def _batches(matrices: Tensor) -> Iterator[slice]:
    """Slices of matrices for one matmul each."""
    count, start = len(matrices), 0
    if matrices[:1].numel() < MIN_MATRIX:
        yield slice(0, count)
        return
    for size in BATCHES:
        while count - start >= size:
            yield slice(start, start + size)
            start += size


def _bmm(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """left @ right * scale, matrix by matrix."""
    out = arena.empty(left, (*left.shape[:2], right.shape[2]), left.dtype)
    for batch in _batches(left):
        if scale == 1.0:
            torch.bmm(left[batch], right[batch], out=out[batch])
        else:
            torch.baddbmm(left.new_empty(1, 1, 1), left[batch], right[batch], beta=0, alpha=scale, out=out[batch])
    return out


def _probs(q: Tensor, k: Tensor, group: TileGroup, out: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K)), [N x G, H / G x tile, S], written to `out` if it is given."""
    scores = _bmm(q, k.mT, 1 / math.sqrt(q.shape[-1]))
    return find("softmax", scores, group.bias_NTS)(scores, group.bias_NTS, out)


def softmax(scores: Tensor, bias_NTS: Tensor, out: Tensor | None = None) -> Tensor:
    """softmax(scores + bias); overwrites the scores."""
    scores.view(len(bias_NTS), -1, *bias_NTS.shape[1:]).add_(bias_NTS[:, None])
    return torch.softmax(scores, dim=-1, out=arena.empty_like(scores) if out is None else out)


def _probs_buffer(q_NGQK: Tensor, groups: list[TileGroup]) -> Tensor:
    """Memory for all saved probabilities."""
    keys = [group.bias_NTS.shape[-1] for group in groups]
    kept = sum(len(group.tile_N) * count for group, count in zip(groups, keys, strict=True) if count <= MAX_KEPT_KEYS)
    return arena.empty(q_NGQK, (kept * q_NGQK[0, :, :, 0].numel(),), q_NGQK.dtype)


def _group_probs(probs_P: Tensor, q_NGQK: Tensor, groups: list[TileGroup]) -> Iterator[Tensor | None]:
    """Each group's part of `_probs_buffer`; None if the group has too many probabilities to save, or probs_P is
    empty."""
    start, num_groups, num_queries = 0, *q_NGQK.shape[1:3]
    for group in groups:
        shape = (len(group.tile_N) * num_groups, num_queries, group.bias_NTS.shape[-1])
        if not len(probs_P) or shape[-1] > MAX_KEPT_KEYS:
            yield None
            continue
        size = math.prod(shape)
        yield probs_P[start : start + size].view(shape)
        start += size


def _forward(q_NGQK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, groups: list[TileGroup], probs_P: Tensor) -> Tensor:
    """out_NGQK. probs_P: of `_probs_buffer` or larger, filled for the backward pass; empty: nothing is saved."""
    out_NGQK = arena.empty_like(q_NGQK)
    for group, part in zip(groups, _group_probs(probs_P, q_NGQK, groups), strict=True):
        probs = _probs(_gather_queries(q_NGQK, group), _gather_keys(k_NGTK, group), group, part)
        out_NGQK.index_copy_(0, group.tile_N, _bmm(probs, _gather_keys(v_NGTK, group)).view(-1, *q_NGQK.shape[1:]))
    return out_NGQK


def _backward(
    grad_out_NGQK: Tensor, q_NGQK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, groups: list[TileGroup], probs_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, those of k and v in float32.

    With P the probabilities and U the upstream gradient: dv = P^T U; dS = P (dP - sum P dP) with dP = U v^T, which
    is torch's softmax backward; dq = dS k / sqrt(K); dk = dS^T q / sqrt(K). dk and dv of a tile are summed over
    the query tiles that attend to it, in float32.
    """
    scale = 1 / math.sqrt(q_NGQK.shape[-1])
    grad_q_NGQK, wide = arena.empty_like(q_NGQK), torch.promote_types(k_NGTK.dtype, torch.float32)
    grad_k_NGTK, grad_v_NGTK = (arena.empty(k_NGTK, k_NGTK.shape, wide).zero_() for _ in range(2))
    for group, saved_probs in zip(groups, _group_probs(probs_P, q_NGQK, groups), strict=True):
        q, upstream = _gather_queries(q_NGQK, group), _gather_queries(grad_out_NGQK, group)
        k = _gather_keys(k_NGTK, group)
        probs = _probs(q, k, group) if saved_probs is None else saved_probs
        _scatter_add_keys(grad_v_NGTK, group, _bmm(probs.mT, upstream))
        grad_scores = _bmm(upstream, _gather_keys(v_NGTK, group).mT)
        torch.ops.aten._softmax_backward_data.out(grad_scores, probs, -1, probs.dtype, grad_input=grad_scores)
        grad_q_NGQK.index_copy_(0, group.tile_N, _bmm(grad_scores, k, scale).view(-1, *q_NGQK.shape[1:]))
        _scatter_add_keys(grad_k_NGTK, group, _bmm(grad_scores.mT, q, scale))
    return grad_q_NGQK, grad_k_NGTK, grad_v_NGTK


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        groups: list[TileGroup],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        rotaries = zip((q_BTHK, k_BTGK, v_BTGK), (rotary, rotary, None), strict=True)
        q_NGQK, k_NGTK, v_NGTK = (_to_tiles(x, k_BTGK.shape[2], rotary) for x, rotary in rotaries)
        probs_P = _probs_buffer(q_NGQK, groups if any(ctx.needs_input_grad) else [])
        ctx.groups, ctx.rotary = groups, rotary
        ctx.save_for_backward(q_NGQK, k_NGTK, v_NGTK, probs_P)
        return _to_rows(_forward(q_NGQK, k_NGTK, v_NGTK, groups, probs_P), q_BTHK.shape[1], q_BTHK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q_NGQK, k_NGTK, v_NGTK, probs_P = ctx.saved_tensors
        grad_out_NGQK = _to_tiles(upstream[0].contiguous(), k_NGTK.shape[1])
        grads = _backward(grad_out_NGQK, q_NGQK, k_NGTK, v_NGTK, ctx.groups, probs_P)
        rotaries = zip(grads, (ctx.rotary, ctx.rotary, None), strict=True)
        return (*(_to_rows(x, upstream[0].shape[1], q_NGQK.dtype, rotary) for x, rotary in rotaries), None, None)
