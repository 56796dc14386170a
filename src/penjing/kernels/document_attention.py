"""Attention over packed rows, document by document: keys that no query may look at are hardly computed.

Two ways for two kinds of device, both equal to masked `scaled_dot_product_attention`, the plain reference that tests
compare with: `tiled_attention` on CPUs, `varlen_attention` on CUDA.

On a CPU with kernels of our own both are one (kernels/cpu/attention.c), which keeps no scores. Where they do not serve,
queries are taken in tiles of 64 positions. A tile needs the keys from where its first query's document
begins to its own end, in whole tiles too; tiles that need equally many go through one batched product. Scores are
rounded to the products' dtype before the softmax, as in an eager `transformers` model.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.ops import TILE
from penjing.model.rope import rotate

# Matrices of one batched product: each size of product is compiled when it first comes up, and takes 0.5 MiB then on.
RUNS = (8, 2, 1)
LEAST_MATRIX = 1 << 14  # values, for runs: with smaller ones calls would take longer than what they call
# Tiles with up to this many keys keep their probabilities for the backward pass (2 x H x keys bytes a token in
# bfloat16); those of others are made again: a third more time in attention, and memory in proportion to the tokens.
KEPT_KEYS = 256


@dataclass(frozen=True, slots=True)
class Lot:
    """Tiles that need equally many keys. Tiles are numbered through all rows."""

    tile_N: Tensor  # of queries
    key_tile_NM: Tensor  # the M tiles of keys that each needs
    bias_NTS: Tensor  # 0 where the query may look, -inf where not; T positions of a tile, S = M x T
    _places: dict[int, Tensor] = field(default_factory=dict)

    def places(self, num_groups: int) -> Tensor:
        """Which tiles of which key head are needed, heads counted through: N x G x M. Every layer asks alike."""
        if num_groups not in self._places:
            group_G1 = torch.arange(num_groups)[:, None]
            self._places[num_groups] = (self.key_tile_NM[:, None] * num_groups + group_G1).flatten()
        return self._places[num_groups]


def find_lots(document_BT: Tensor, mask_B1TS: Tensor | None, window: int, dtype: torch.dtype) -> list[Lot]:
    """Which tiles of keys each tile of queries needs. Equal neighbours in document_BT are one document.

    mask_B1TS: True where a query may look, for documents that branch; None: at its document's past, of it at the last
    `window` positions, its own included (0: all).
    """
    document_BT = functional.pad(document_BT, (0, -document_BT.shape[1] % TILE), value=-2)
    rows, num_tokens = document_BT.shape
    place_T, num_tiles = torch.arange(num_tokens), num_tokens // TILE
    new_BT = document_BT[:, 1:] != document_BT[:, :-1]
    start_BT = functional.pad(new_BT * place_T[1:], (1, 0)).cummax(dim=1).values
    nearest_BN = start_BT[:, ::TILE]
    if window:
        nearest_BN = nearest_BN.maximum(place_T[::TILE] + 1 - window)
    first_N = (nearest_BN // TILE + torch.arange(rows)[:, None] * num_tiles).flatten()
    tile_N = torch.arange(rows * num_tiles)
    needs_N = tile_N - first_N + 1
    tiles_NT, place_NT = document_BT.view(-1, TILE), place_T.repeat(rows).view(-1, TILE)
    lots = []
    for needed in sorted(set(needs_N.tolist())):
        mine_N = (needs_N == needed).nonzero()[:, 0]
        keys_NM = first_N[mine_N, None] + torch.arange(needed)
        query_NT1, key_N1S = place_NT[mine_N][:, :, None], place_NT[keys_NM].flatten(1)[:, None]
        hidden_NTS = key_N1S > query_NT1
        if mask_B1TS is None:
            hidden_NTS |= tiles_NT[mine_N][:, :, None] != tiles_NT[keys_NM].flatten(1)[:, None]
            if window:
                hidden_NTS |= key_N1S <= query_NT1 - window
        else:
            last = mask_B1TS.shape[-1] - 1  # what was added at the end looks at itself only
            seen_NTS = mask_B1TS[
                mine_N[:, None, None] // num_tiles, 0, query_NT1.clamp(max=last), key_N1S.clamp(max=last)
            ]
            hidden_NTS |= torch.where((query_NT1 > last) | (key_N1S > last), query_NT1 != key_N1S, ~seen_NTS)
        bias_NTS = torch.zeros(hidden_NTS.shape, dtype=dtype).masked_fill_(hidden_NTS, -math.inf)
        lots.append(Lot(mine_N, keys_NM, bias_NTS))
    return lots


def tiled_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    document_BT: Tensor,
    mask_B1TS: Tensor | None = None,
    window: int = 0,
    lots: list[Lot] | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    first_BT: Tensor | None = None,
) -> Tensor:
    """mixed_BTHK on a CPU: softmax(q k^T / sqrt(K)) v. lots: `find_lots` of the three before it, where known; rotary:
    `rotary_table` of the positions where q and k are still to be turned; first_BT: `cpu.first_keys` of the documents
    where our own kernel is to be asked."""
    by_kernels = cpu.serves(q_BTHK, k_BTGK, v_BTGK, wide=rotary or ())
    if by_kernels and first_BT is not None and q_BTHK.dtype == k_BTGK.dtype == v_BTGK.dtype:
        return _ByKernel.apply(q_BTHK, k_BTGK, v_BTGK, first_BT, rotary)  # type: ignore[no-any-return,no-untyped-call]
    if rotary is not None and not by_kernels:
        q_BTHK, k_BTGK, rotary = rotate(q_BTHK, *rotary), rotate(k_BTGK, *rotary), None
    if torch.compiler.is_compiling():
        num_groups = k_BTGK.shape[2]
        q_NGQK, k_NGTK, v_NGTK = (_tiles(x, num_groups) for x in (q_BTHK, k_BTGK, v_BTGK))
        keep = torch.is_grad_enabled() and q_BTHK.requires_grad
        mixed_NGQK: Tensor = _tiled_op(q_NGQK, k_NGTK, v_NGTK, document_BT, mask_B1TS, window, keep)[0]
        return _rows(mixed_NGQK, q_BTHK.shape[1], q_BTHK.dtype)
    if lots is None:
        lots = find_lots(document_BT, mask_B1TS, window, q_BTHK.dtype)
    return _Tiled.apply(q_BTHK, k_BTGK, v_BTGK, lots, rotary)  # type: ignore[no-any-return,no-untyped-call]


def _tiles(x_BTHK: Tensor, num_groups: int, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """[tiles of all rows, G, H / G x tile, K]; rows are filled up to whole tiles with zeros. rotary: to be turned by,
    where kernels serve."""
    if cpu.serves(x_BTHK):
        x_NHTK = cpu.tiles_of(x_BTHK, rotary)
        return x_NHTK.view(len(x_NHTK), num_groups, -1, x_BTHK.shape[-1])
    missing = -x_BTHK.shape[1] % TILE
    x_BTHK = functional.pad(x_BTHK, (0, 0, 0, 0, 0, missing)) if missing else x_BTHK
    num_heads, size = x_BTHK.shape[2:]
    x_NTGRK = x_BTHK.reshape(-1, TILE, num_groups, num_heads // num_groups, size)
    x_NGRTK = _copied(x_NTGRK.permute(0, 2, 3, 1, 4), x_BTHK.dtype)
    return x_NGRTK.view(-1, num_groups, num_heads // num_groups * TILE, size)


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values one after another in memory."""
    return x.to(dtype).contiguous() if torch.compiler.is_compiling() else arena.empty(x, x.shape, dtype).copy_(x)


def _rows(
    tile_NGQK: Tensor, num_tokens: int, dtype: torch.dtype, rotary: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The way back of `_tiles`: rows of so many positions."""
    _, num_groups, num_queries, size = tile_NGQK.shape
    if dtype in cpu.TYPES and cpu.serves(tile_NGQK):
        return cpu.rows_of(tile_NGQK.view(len(tile_NGQK), -1, TILE, size), num_tokens, dtype, rotary)
    heads, rows = num_groups * num_queries // TILE, len(tile_NGQK) // -(-num_tokens // TILE)
    x_NGRTK = tile_NGQK.view(len(tile_NGQK), tile_NGQK.shape[1], -1, TILE, size)
    return _copied(x_NGRTK.permute(0, 3, 1, 2, 4), dtype).view(rows, -1, heads, size)[:, :num_tokens]


def _queries(tile_NGQK: Tensor, lot: Lot) -> Tensor:
    """[N x G, Q, K]: the heads that share a key head side by side; Q is their number times the tile."""
    room = arena.empty(tile_NGQK, (len(lot.tile_N), *tile_NGQK.shape[1:]), tile_NGQK.dtype)
    return torch.index_select(tile_NGQK, 0, lot.tile_N, out=room).flatten(0, 1)


def _keys(tile_NGTK: Tensor, lot: Lot) -> Tensor:
    """[N x G, S, K]."""
    num_groups, size = tile_NGTK.shape[1], tile_NGTK.shape[-1]
    place = lot.places(num_groups)
    room = arena.empty(tile_NGTK, (len(place), *tile_NGTK.shape[2:]), tile_NGTK.dtype)
    return torch.index_select(tile_NGTK.flatten(0, 1), 0, place, out=room).view(len(lot.tile_N) * num_groups, -1, size)


def _add_keys(into_NGTK: Tensor, lot: Lot, value: Tensor) -> None:
    """The way back of `_keys`; a tile of keys may be needed by several of queries."""
    num_groups, *tile = into_NGTK.shape[1:]
    if cpu.serves(value, wide=[into_NGTK]):
        cpu.add_tiles(into_NGTK.flatten(0, 1), lot.places(num_groups), value)
        return
    into_NGTK.flatten(0, 1).index_add_(0, lot.places(num_groups), arena.cast(value, into_NGTK.dtype).view(-1, *tile))


def _runs(matrices: Tensor) -> Iterator[slice]:
    """Those that one product takes."""
    count, start = len(matrices), 0
    if matrices[:1].numel() < LEAST_MATRIX:
        yield slice(0, count)
        return
    for size in RUNS:
        while count - start >= size:
            yield slice(start, start + size)
            start += size


def _batched(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """left @ right * scale, matrix by matrix."""
    out = arena.empty(left, (*left.shape[:2], right.shape[2]), left.dtype)
    for run in _runs(left):
        if scale == 1.0:
            torch.bmm(left[run], right[run], out=out[run])
        else:
            torch.baddbmm(left.new_empty(1, 1, 1), left[run], right[run], beta=0, alpha=scale, out=out[run])
    return out


def _probabilities(q: Tensor, k: Tensor, lot: Lot, out: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K)), [N x G, H / G x tile, S], written to `out` if it is given."""
    scores = _batched(q, k.mT, 1 / math.sqrt(q.shape[-1]))
    if cpu.serves(scores, lot.bias_NTS) and lot.bias_NTS.dtype == scores.dtype:
        return cpu.softmax(scores, lot.bias_NTS, scores if out is None else out)
    num_tiles, *each = lot.bias_NTS.shape
    scores.view(num_tiles, -1, *each).add_(lot.bias_NTS[:, None])
    return torch.softmax(scores, dim=-1, out=arena.empty_like(scores) if out is None else out)


def _room(q_NGQK: Tensor, lots: list[Lot]) -> Tensor:
    """Room for all probabilities that are kept."""
    keys = [lot.bias_NTS.shape[-1] for lot in lots]
    kept = sum(len(lot.tile_N) * each for lot, each in zip(lots, keys, strict=True) if each <= KEPT_KEYS)
    return arena.empty(q_NGQK, (kept * q_NGQK[0, :, :, 0].numel(),), q_NGQK.dtype)


def _parts(room_P: Tensor, q_NGQK: Tensor, lots: list[Lot]) -> Iterator[Tensor | None]:
    """Of each lot the part of `_room` that takes its probabilities; None if they are too many, or room_P is empty."""
    start, num_groups, num_queries = 0, *q_NGQK.shape[1:3]
    for lot in lots:
        shape = (len(lot.tile_N) * num_groups, num_queries, lot.bias_NTS.shape[-1])
        if not len(room_P) or shape[-1] > KEPT_KEYS:
            yield None
            continue
        size = math.prod(shape)
        yield room_P[start : start + size].view(shape)
        start += size


def _forward(q_NGQK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, lots: list[Lot], room_P: Tensor) -> Tensor:
    """mixed_NGQK. room_P: of `_room` or larger, filled for the backward pass; empty: nothing is kept."""
    mixed_NGQK = arena.empty_like(q_NGQK)
    for lot, part in zip(lots, _parts(room_P, q_NGQK, lots), strict=True):
        odds = _probabilities(_queries(q_NGQK, lot), _keys(k_NGTK, lot), lot, part)
        mixed_NGQK.index_copy_(0, lot.tile_N, _batched(odds, _keys(v_NGTK, lot)).view(-1, *q_NGQK.shape[1:]))
    return mixed_NGQK


def _backward(
    upstream_NGQK: Tensor,
    q_NGQK: Tensor,
    k_NGTK: Tensor,
    v_NGTK: Tensor,
    lots: list[Lot],
    room_P: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, those of k and v in float32.

    With P the probabilities and U the upstream gradient: dv = P^T U; dS = P (dP - sum P dP) with dP = U v^T, which
    torch has as the softmax's backward; dq = dS k / sqrt(K); dk = dS^T q / sqrt(K). dk and dv of a tile are summed over
    the tiles that looked at it in float32.
    """
    scale = 1 / math.sqrt(q_NGQK.shape[-1])
    grad_q_NGQK, wide = arena.empty_like(q_NGQK), torch.promote_types(k_NGTK.dtype, torch.float32)
    grad_k_NGTK, grad_v_NGTK = (arena.empty(k_NGTK, k_NGTK.shape, wide).zero_() for _ in range(2))
    for lot, kept in zip(lots, _parts(room_P, q_NGQK, lots), strict=True):
        q, upstream, k = _queries(q_NGQK, lot), _queries(upstream_NGQK, lot), _keys(k_NGTK, lot)
        odds = _probabilities(q, k, lot) if kept is None else kept
        _add_keys(grad_v_NGTK, lot, _batched(odds.mT, upstream))
        slope = _batched(upstream, _keys(v_NGTK, lot).mT)
        torch.ops.aten._softmax_backward_data.out(slope, odds, -1, odds.dtype, grad_input=slope)
        grad_q_NGQK.index_copy_(0, lot.tile_N, _batched(slope, k, scale).view(-1, *q_NGQK.shape[1:]))
        _add_keys(grad_k_NGTK, lot, _batched(slope.mT, q, scale))
    return grad_q_NGQK, grad_k_NGTK, grad_v_NGTK


class _ByKernel(torch.autograd.Function):
    """Attention that keeps no probabilities: scores are made again, tile by tile (kernels/cpu/attention.c)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        first_BT: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        turns = zip((q_BTHK, k_BTGK, v_BTGK), (rotary, rotary, None), strict=True)
        q_NHTK, k_NGTK, v_NGTK = (cpu.tiles_of(x, turn) for x, turn in turns)
        mixed_NHTK, norm_NHT = cpu.attention(q_NHTK, k_NGTK, v_NGTK, first_BT)
        mixed_BTHK = cpu.rows_of(mixed_NHTK, q_BTHK.shape[1], q_BTHK.dtype, None)
        ctx.rotary = rotary
        ctx.save_for_backward(q_NHTK, k_NGTK, v_NGTK, mixed_BTHK, norm_NHT, first_BT)
        return mixed_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q_NHTK, k_NGTK, v_NGTK, mixed_BTHK, norm_NHT, first_BT = ctx.saved_tensors
        num_tokens, dtype = mixed_BTHK.shape[1], mixed_BTHK.dtype
        above_NHTK, mixed_NHTK = (cpu.tiles_of(x, None) for x in (upstream[0].contiguous(), mixed_BTHK))
        found = cpu.attention_slopes(above_NHTK, q_NHTK, k_NGTK, v_NGTK, mixed_NHTK, norm_NHT, first_BT)
        turns = zip(found, (ctx.rotary, ctx.rotary, None), strict=True)
        return (*(cpu.rows_of(each, num_tokens, dtype, turn) for each, turn in turns), None, None)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        lots: list[Lot],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        turns = zip((q_BTHK, k_BTGK, v_BTGK), (rotary, rotary, None), strict=True)
        q_NGQK, k_NGTK, v_NGTK = (_tiles(x, k_BTGK.shape[2], turn) for x, turn in turns)
        room_P = _room(q_NGQK, lots if any(ctx.needs_input_grad) else [])
        ctx.lots, ctx.rotary = lots, rotary
        ctx.save_for_backward(q_NGQK, k_NGTK, v_NGTK, room_P)
        return _rows(_forward(q_NGQK, k_NGTK, v_NGTK, lots, room_P), q_BTHK.shape[1], q_BTHK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q_NGQK, k_NGTK, v_NGTK, room_P = ctx.saved_tensors
        upstream_NGQK = _tiles(upstream[0].contiguous(), k_NGTK.shape[1])
        found = _backward(upstream_NGQK, q_NGQK, k_NGTK, v_NGTK, ctx.lots, room_P)
        turns = zip(found, (ctx.rotary, ctx.rotary, None), strict=True)
        return (*(_rows(each, upstream[0].shape[1], q_NGQK.dtype, turn) for each, turn in turns), None, None)


class _Found:
    """`find_lots` for operators that each layer and its backward pass call with the same documents: the last answers.

    Documents are compared by what they are, which takes no time beside finding lots.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # backward passes have a thread of their own
        self._document_BT, self._mask_B1TS = torch.empty(0), torch.empty(0)
        self._lots: dict[tuple[int, torch.dtype], list[Lot]] = {}

    def __call__(self, document_BT: Tensor, mask_B1TS: Tensor | None, window: int, dtype: torch.dtype) -> list[Lot]:
        mask_given = torch.empty(0) if mask_B1TS is None else mask_B1TS
        with self._lock:
            if not torch.equal(document_BT, self._document_BT) or not torch.equal(mask_given, self._mask_B1TS):
                self._document_BT, self._mask_B1TS, self._lots = document_BT.clone(), mask_given.clone(), {}
            if (window, dtype) not in self._lots:
                self._lots[window, dtype] = find_lots(document_BT, mask_B1TS, window, dtype)
            return self._lots[window, dtype]


_found = _Found()


# The same as two operators that `torch.compile` takes as they are: which tiles are needed is data, which would break
# its graph. An operator's outputs have known shapes: the room is that for KEPT_KEYS keys of every query.
@torch.library.custom_op("penjing::tiled_attention", mutates_args=())
def _tiled_op(
    q_NGQK: Tensor,
    k_NGTK: Tensor,
    v_NGTK: Tensor,
    document_BT: Tensor,
    mask_B1TS: Tensor | None,
    window: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    room_P = _most_room(q_NGQK, keep)
    return _forward(q_NGQK, k_NGTK, v_NGTK, _found(document_BT, mask_B1TS, window, q_NGQK.dtype), room_P), room_P


def _most_room(q_NGQK: Tensor, keep: bool) -> Tensor:
    return q_NGQK.new_empty(q_NGQK[..., 0].numel() * KEPT_KEYS * keep)


@torch.library.custom_op("penjing::tiled_attention_backward", mutates_args=())
def _tiled_backward_op(
    upstream_NGQK: Tensor,
    q_NGQK: Tensor,
    k_NGTK: Tensor,
    v_NGTK: Tensor,
    room_P: Tensor,
    document_BT: Tensor,
    mask_B1TS: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    lots = _found(document_BT, mask_B1TS, window, q_NGQK.dtype)
    grad_q, grad_k, grad_v = _backward(upstream_NGQK, q_NGQK, k_NGTK, v_NGTK, lots, room_P)
    return grad_q, arena.cast(grad_k, k_NGTK.dtype), arena.cast(grad_v, v_NGTK.dtype)


@_tiled_op.register_fake
def _(q_NGQK: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_NGQK), _most_room(q_NGQK, more[-1])


@_tiled_backward_op.register_fake
def _(_: Tensor, q_NGQK: Tensor, k_NGTK: Tensor, v_NGTK: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_NGQK), torch.empty_like(k_NGTK), torch.empty_like(v_NGTK)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_NGQK, k_NGTK, v_NGTK, document_BT, mask_B1TS, ctx.window, _ = inputs
    ctx.save_for_backward(q_NGQK, k_NGTK, v_NGTK, output[1], document_BT, mask_B1TS)


def _gradients(ctx: Any, upstream_NGQK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _tiled_backward_op(upstream_NGQK.contiguous(), *ctx.saved_tensors, ctx.window)
    return (*found, None, None, None, None)


_tiled_op.register_autograd(_gradients, setup_context=_keep_inputs)


# --- CUDA ------------------------------------------------------------------------------------------------------------


@cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """torch's kernel (2.10 and later) with the names of its arguments; None where it is not there."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def has_varlen(device: torch.device, dtype: torch.dtype, head_size: int, window: int = 0) -> bool:
    """Whether `varlen_attention` serves such queries: half precision on a card that FlashAttention runs on."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size > 256 or head_size % 8:
        return False
    found = _varlen()
    if found is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return "window_size" in found[1] or ("is_causal" in found[1] and not window)


def varlen_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, edge_S: Tensor, longest: int, window: int = 0
) -> Tensor:
    """mixed_BTHK by torch's variable-length kernel (FlashAttention 2; 3 or 4 where activated).

    edge_S: where each document starts in the rows laid end to end, then their end, int32; repeats of the end are
    documents of no tokens. longest: at least the length of the longest. window: as in `tiled_attention`.
    """
    found = _varlen()
    assert found is not None, "ask has_varlen first"
    return call_varlen(*found, q_BTHK, k_BTGK, v_BTGK, edge_S, longest, window)


def call_varlen(
    kernel: Callable[..., Any],
    names: frozenset[str],
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    edge_S: Tensor,
    longest: int,
    window: int,
) -> Tensor:
    """Call the kernel with the arguments that this version of torch knows.

    2.10 has `is_causal` alone; 2.11 has `window_size`, whose left side leaves the query's own position out; 2.12 and
    later want `enable_gqa` to be said, and without that name keys are repeated for each query head.
    """
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    more: dict[str, Any] = {"window_size": (window - 1 if window else -1, 0)}
    if "window_size" not in names:
        more = {"is_causal": True}
    if repeats > 1:
        if "enable_gqa" in names:
            more["enable_gqa"] = True
        else:
            k_BTGK, v_BTGK = (x.repeat_interleave(repeats, dim=2) for x in (k_BTGK, v_BTGK))
    q_NHK, k_NGK, v_NGK = (x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
    mixed_NHK: Tensor = kernel(q_NHK, k_NGK, v_NGK, edge_S, edge_S, longest, longest, **more)
    return mixed_NHK.view(q_BTHK.shape)
