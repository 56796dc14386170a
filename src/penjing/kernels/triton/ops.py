"""The Triton kernels (kernels/triton/kernels.py) as operators, which torch.compile and the planner take as they are.

Attention over packed documents (the algorithm of arXiv:2307.08691): a tile of queries begins with the first key that
its first query may look at, so that what lies in other documents is not computed. Key heads that several query heads
share are read in place, their gradients summed where they are made; no sum is left to chance, so equal steps give
equal gradients. torch's variable-length kernel took 2.7 to 5.7 times as long with documents of 300 tokens on average,
1.7 to 2.1 times with rows of one document (docs/speed.md).

The head's softmax: the loss of each position, and the gradient in the place of its logits, in one launch.
"""

import importlib.util
import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penjing.kernels import SWITCH
from penjing.kernels.attention_metadata import AttentionInputs, AttentionMetadata, QKNorm, Rotary, key_ranges
from penjing.kernels.triton.tiles import Tile, tiles

has_triton = importlib.util.find_spec("triton") is not None  # a plan says what the planned card's machine has
_is_on = os.environ.get(SWITCH) != "off"
WIDEST = 128  # dimensions of a head that the tiles below are for
CHUNKS = {16384: 1024, 1 << 62: 4096}  # logits of one position that are held at once, by the size of the vocabulary


def has_kernels(device: torch.device) -> bool:
    """Whether kernels of our own run on `device`: an NVIDIA card from compute capability 8.0 on, with Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return _is_on and has_triton and torch.cuda.get_device_capability(device) >= (8, 0)


def missing() -> str:
    """Why this machine's cards run none of the kernels, whatever the card; empty: they do."""
    return "they are switched off" if not _is_on else "" if has_triton else "Triton is not installed"


def switch_off() -> None:
    """From here on torch's own operations, in this process."""
    global _is_on
    _is_on = False


def reason(device: torch.device, dtype: torch.dtype | None) -> str:
    """Why kernels do not take what is computed in `dtype` on this device; empty: they do."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "for half precision"
    return "" if has_kernels(device) else missing() or "for NVIDIA cards of compute capability 8.0 or later"


def supports(op: str, first: Tensor | AttentionInputs, *others: Any) -> str:
    """Why the op's kernel does not take these; empty: it does. A dtype after a tensor is that of the op."""
    dtype = others[0] if others and isinstance(others[0], torch.dtype) else first.dtype
    if (why := reason(first.device, dtype)) or not isinstance(first, AttentionInputs):
        return why
    if first.plain_documents() is None:
        return "for packed documents only"
    return "" if 16 <= first.heads[1] <= WIDEST else f"for heads of 16 to {WIDEST} dimensions"


def attention_metadata(asked: AttentionInputs) -> AttentionMetadata:
    assert asked.document_BT is not None
    return AttentionMetadata(backend="Triton", ranges=key_ranges(asked.document_BT, asked.window))


def fused_attention(
    qkv: tuple[Tensor, ...],
    num_heads: int,
    num_key_value_heads: int,
    norm: QKNorm | None,
    rotary: Rotary,
    metadata: AttentionMetadata,
) -> Tensor:
    """qkv: queries, keys and values in one tensor."""
    assert metadata.ranges is not None
    gains, epsilon = (None, 0.0) if norm is None else (norm[:2], norm.epsilon)
    return fused_qk_norm_rope_attention(qkv[0], gains, epsilon, rotary, metadata.ranges, num_heads, num_key_value_heads)


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0  # Triton's interpreter
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _launch(kernel: Any, programs: tuple[int, ...], first: Tensor, *given: Any, **shape: Any) -> None:
    """Run as many programs of a kernel on the device where `first` is, be it the current one or not."""
    with torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext():
        kernel[programs](first, *given, **shape)


def _strides(*tensors: Tensor) -> list[int]:
    return [x.stride(axis) for x in tensors for axis in (0, 1)]


def _heads_contiguous(x_BTHK: Tensor) -> Tensor:
    """Itself where each position's heads stand one after another."""
    size = x_BTHK.shape[-1]
    return x_BTHK if x_BTHK.stride(-1) == 1 and x_BTHK.stride(-2) == size else x_BTHK.contiguous()


def _attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, first_BT: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(K)) v, each query over its own document's past, out_BTHK; and of each query and head the
    logarithm of the softmax's sum, norm_BHT in float32."""
    from penjing.kernels.triton import kernels

    rows, num_tokens, num_attention_heads, size = q_BTHK.shape
    out_BTHK, norm_BHT = _outputs(q_BTHK)
    tile = tiles(size, _shared_bytes(q_BTHK.device)).forward
    _launch(
        *(kernels.attention_forward, (-(-num_tokens // tile.queries), num_attention_heads, rows)),
        *(q_BTHK, k_BTGK, v_BTGK, out_BTHK, norm_BHT, first_BT),
        *_strides(q_BTHK, k_BTGK, v_BTGK),
        *(num_tokens, num_attention_heads, size**-0.5),
        **_tile_config(num_attention_heads // k_BTGK.shape[2], size, tile),
    )
    return out_BTHK, norm_BHT


def _tile_config(repeats: int, size: int, tile: Tile) -> dict[str, Any]:
    wide, rest = split_head_dim(size)
    return {
        "repeats": repeats,
        "size": size,
        "wide": wide,
        "rest": rest,
        "queries": tile.queries,
        "keys": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def split_head_dim(size: int) -> tuple[int, int]:
    """A head's dimensions as one power of two, or as two where they then hold fewer that there are not: 96 = 64 + 32,
    as Triton knows no other sizes. The second is 0 where there is one."""
    whole = max(16, _power_of_2(size))
    wide = whole // 2
    rest = max(16, _power_of_2(size - wide)) if size > wide >= 16 else whole
    return (wide, rest) if wide + rest < whole else (whole, 0)


def _outputs(q_BTHK: Tensor) -> tuple[Tensor, Tensor]:
    rows, num_tokens, num_attention_heads, _ = q_BTHK.shape
    return q_BTHK.new_empty(q_BTHK.shape), q_BTHK.new_empty(rows, num_attention_heads, num_tokens, dtype=torch.float32)


def _attention_backward(
    upstream_BTHK: Tensor, outputs: list[Tensor], v_BTGK: Tensor, ranges: list[Tensor]
) -> list[Tensor]:
    """The gradients of q, k and v. outputs: of `_fused_attention`."""
    from penjing.kernels.triton import kernels

    (out_BTHK, q_BTHK, k_BTGK, norm_BHT), upstream_BTHK = outputs, _heads_contiguous(upstream_BTHK)
    rows, num_tokens, num_attention_heads, size = q_BTHK.shape
    num_groups = k_BTGK.shape[2]
    grads, delta_BHT = _gradients_like(q_BTHK, k_BTGK, v_BTGK), torch.empty_like(norm_BHT)
    tiled = tiles(size, _shared_bytes(q_BTHK.device))
    strides = _strides(q_BTHK, k_BTGK, v_BTGK, upstream_BTHK)
    _launch(
        *(kernels.attention_queries, (-(-num_tokens // tiled.queries.queries), num_attention_heads, rows)),
        *(q_BTHK, k_BTGK, v_BTGK, out_BTHK, upstream_BTHK, norm_BHT, delta_BHT, grads[0], ranges[0]),
        *strides,
        *(num_tokens, num_attention_heads, size**-0.5),
        **_tile_config(num_attention_heads // num_groups, size, tiled.queries),
    )
    _launch(
        *(kernels.attention_keys, (-(-num_tokens // tiled.keys.keys), num_groups, rows)),
        *(q_BTHK, k_BTGK, v_BTGK, upstream_BTHK, norm_BHT, delta_BHT, *grads[1:], *ranges),
        *strides,
        *(num_tokens, num_attention_heads, size**-0.5),
        **_tile_config(num_attention_heads // num_groups, size, tiled.keys),
    )
    return grads


def _gradients_like(*tensors: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def fused_qk_norm_rope_attention(
    packed_BTJ: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    epsilon: float,
    rotary: tuple[Tensor, Tensor],
    ranges: tuple[Tensor, Tensor],
    num_attention_heads: int,
    num_groups: int,
) -> Tensor:
    """out_BTHK of the heads of queries, keys and values that stand one after another in each position's row.

    gains: of RMSNorm over each query and key head, with `epsilon`; None: they are not normalised. rotary: cosines and
    sines as `rotary_table` makes them. All but the matmuls' inputs in float32.
    """
    tables = [each.flatten(1) for each in rotary]
    found = _fused_attention(
        packed_BTJ, list(gains or ()), tables, list(ranges), epsilon, num_attention_heads, num_groups
    )
    out_BTHK: Tensor = found[0]
    return out_BTHK


POSITIONS = 32  # of one program that prepares heads


def _heads_config(packed_BTJ: Tensor, cosine_BR: Tensor, heads: int, groups: int, normal: bool) -> dict[str, Any]:
    num_tokens, size = packed_BTJ.shape[1], packed_BTJ.shape[-1] // (heads + 2 * groups)
    rotated = 2 * cosine_BR.shape[1] // num_tokens
    return {
        "packed_token": packed_BTJ.shape[-1],
        "total": packed_BTJ.shape[0] * num_tokens,
        "num_tokens": num_tokens,
        "table_row": num_tokens if len(cosine_BR) > 1 else 0,
        "heads": heads,
        "groups": groups,
        "size": size,
        "rotated": rotated,
        "normal": normal,
        "wide": _power_of_2(rotated // 2),
        "rest_wide": _power_of_2(size - rotated),
        "positions": POSITIONS,
        "num_warps": 2 if size > 64 else 4,
    }


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@torch.library.custom_op("penjing::fused_qk_norm_rope_attention", mutates_args=())
def _fused_attention(
    packed_BTJ: Tensor,
    gains: list[Tensor],
    rotary: list[Tensor],
    ranges: list[Tensor],
    epsilon: float,
    num_attention_heads: int,
    num_groups: int,
) -> list[Tensor]:
    """out_BTHK, and for the backward pass q_BTHK and k_BTGK as attention saw them and norm_BHT. gains: of queries and
    of keys, or none. rotary: cosine_BR, sine_BR. ranges: first_BT, last_BT."""
    from penjing.kernels.triton import kernels

    packed_BTJ = packed_BTJ.contiguous()
    q_BTHK, k_BTGK = _heads_of(packed_BTJ, num_attention_heads, num_groups)
    shape = _heads_config(packed_BTJ, rotary[0], num_attention_heads, num_groups, bool(gains))
    _launch(
        *(kernels.heads_forward, (-(-shape["total"] // POSITIONS), num_attention_heads + num_groups)),
        *(packed_BTJ, q_BTHK, k_BTGK, *(gains or rotary)),  # without gains none are read
        *(each.contiguous() for each in rotary),
        epsilon=epsilon,
        **shape,
    )
    out_BTHK, norm_BHT = _attention(q_BTHK, k_BTGK, _values(packed_BTJ, k_BTGK), ranges[0])
    return [out_BTHK, q_BTHK, k_BTGK, norm_BHT]


def _heads_of(packed_BTJ: Tensor, num_attention_heads: int, num_groups: int) -> tuple[Tensor, Tensor]:
    rows, size = packed_BTJ.shape[:2], packed_BTJ.shape[-1] // (num_attention_heads + 2 * num_groups)
    return packed_BTJ.new_empty(*rows, num_attention_heads, size), packed_BTJ.new_empty(*rows, num_groups, size)


def _values(packed_BTJ: Tensor, k_BTGK: Tensor) -> Tensor:
    return packed_BTJ[..., -k_BTGK.shape[2:].numel() :].view(k_BTGK.shape)


@_fused_attention.register_fake
def _(packed_BTJ: Tensor, *more: Any) -> list[Tensor]:
    q_BTHK, k_BTGK = _heads_of(packed_BTJ, *more[-2:])
    out_BTHK, norm_BHT = _outputs(q_BTHK)
    return [out_BTHK, q_BTHK, k_BTGK, norm_BHT]


@torch.library.custom_op("penjing::fused_qk_norm_rope_attention_backward", mutates_args=())
def _fused_attention_backward(
    upstream_BTHK: Tensor,
    packed_BTJ: Tensor,
    gains: list[Tensor],
    rotary: list[Tensor],
    ranges: list[Tensor],
    outputs: list[Tensor],
    epsilon: float,
) -> list[Tensor]:
    """The gradients of packed_BTJ and of the gains. outputs: what the forward pass gave."""
    from penjing.kernels.triton import kernels

    packed_BTJ, (_, q_BTHK, k_BTGK, _) = packed_BTJ.contiguous(), outputs
    num_attention_heads, num_groups, size = q_BTHK.shape[2], k_BTGK.shape[2], q_BTHK.shape[3]
    grads = _attention_backward(upstream_BTHK, outputs, _values(packed_BTJ, k_BTGK), ranges)
    shape = _heads_config(packed_BTJ, rotary[0], num_attention_heads, num_groups, bool(gains))
    grad_BTJ, programs = torch.empty_like(packed_BTJ), -(-shape["total"] // POSITIONS)
    sums = (programs if gains else 0, num_attention_heads + num_groups, size)
    grad_gain = packed_BTJ.new_empty(sums, dtype=torch.float32)
    _launch(
        *(kernels.heads_backward, (programs, num_attention_heads + 2 * num_groups)),
        *(packed_BTJ, *grads, grad_BTJ, grad_gain, *(gains or rotary)),
        *(each.contiguous() for each in rotary),
        epsilon=epsilon,
        **shape,
    )
    parts = grad_gain[:, :num_attention_heads], grad_gain[:, num_attention_heads:]
    return [grad_BTJ, *(part.sum(dim=(0, 1)).to(gain.dtype) for part, gain in zip(parts, gains, strict=False))]


@_fused_attention_backward.register_fake
def _(_: Tensor, packed_BTJ: Tensor, gains: list[Tensor], *__: Any) -> list[Tensor]:
    return _gradients_like(packed_BTJ, *gains)


def _save_fused_attention(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    packed_BTJ, gains, rotary, ranges, ctx.epsilon, _, __ = inputs
    ctx.save_for_backward(packed_BTJ, *gains, *rotary, *ranges, *output)


def _fused_attention_autograd(ctx: Any, upstream: list[Tensor]) -> tuple[Any, ...]:
    packed_BTJ, *saved = ctx.saved_tensors
    gains, rotary, ranges, outputs = saved[:-8], saved[-8:-6], saved[-6:-4], saved[-4:]
    grad_BTJ, *grads = _fused_attention_backward(upstream[0], packed_BTJ, gains, rotary, ranges, outputs, ctx.epsilon)
    return grad_BTJ, grads, [None, None], [None, None], None, None, None


_fused_attention.register_autograd(_fused_attention_autograd, setup_context=_save_fused_attention)


def _chunk_config(chunk: int) -> dict[str, Any]:
    """Of a kernel that holds so many values at once: 8 of them in each lane."""
    return {"chunk": chunk, "num_warps": chunk // 256}


def chunk_size(size: int) -> int:
    """Values of a row that are held at once: few lanes past its end, then few rounds."""
    return min((2048, 1024, 512, 256), key=lambda chunk: -(-size // chunk) * chunk)


@torch.library.custom_op("penjing::swiglu", mutates_args=())
def packed_swiglu(packed_NG: Tensor) -> Tensor:
    """silu(gate) * up, [..., F], of gate and up one after the other, [..., 2F]."""
    from penjing.kernels.triton import kernels

    packed_NG = packed_NG.contiguous()
    inner_NF = _inner_like(packed_NG)
    size = inner_NF.shape[-1]
    if inner_NF.numel():
        chunk = chunk_size(size)
        _launch(
            *(kernels.swiglu_forward, (inner_NF.numel() // size,)),
            *(packed_NG, inner_NF),
            size=size,
            **_chunk_config(chunk),
        )
    return inner_NF


def _inner_like(packed_NG: Tensor) -> Tensor:
    return packed_NG.new_empty(*packed_NG.shape[:-1], packed_NG.shape[-1] // 2)


@packed_swiglu.register_fake
def _(packed_NG: Tensor) -> Tensor:
    return _inner_like(packed_NG)


@torch.library.custom_op("penjing::swiglu_backward", mutates_args=())
def weighted_swiglu_backward(upstream_NF: Tensor, packed_NG: Tensor, weight_R: Tensor | None) -> list[Tensor]:
    """The gradient of packed_NG. For rows that count `weight` also silu(gate) * up * weight, and the weights' gradient
    in float32."""
    from penjing.kernels.triton import kernels

    upstream_NF, packed_NG = upstream_NF.contiguous(), packed_NG.contiguous()
    size = upstream_NF.shape[-1]
    rows, chunk = upstream_NF.numel() // size, chunk_size(size)
    found = _swiglu_backward_like(upstream_NF, packed_NG, weight_R)
    grad_NG, inner_NF, grad_R = found if weight_R is not None else (*found, upstream_NF, upstream_NF)
    if rows:
        _launch(
            *(kernels.swiglu_backward, (rows,)),
            *(upstream_NF, packed_NG, grad_R if weight_R is None else weight_R, grad_NG, inner_NF, grad_R),
            size=size,
            weighted=weight_R is not None,
            **_chunk_config(chunk),
        )
    return found


def _swiglu_backward_like(upstream_NF: Tensor, packed_NG: Tensor, weight_R: Tensor | None) -> list[Tensor]:
    grad_NG = packed_NG.new_empty(packed_NG.shape)
    if weight_R is None:
        return [grad_NG]
    return [grad_NG, upstream_NF.new_empty(upstream_NF.shape), weight_R.new_empty(weight_R.shape, dtype=torch.float32)]


weighted_swiglu_backward.register_fake(_swiglu_backward_like)
packed_swiglu.register_autograd(
    lambda ctx, upstream_NF: weighted_swiglu_backward(upstream_NF, *ctx.saved_tensors, None)[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
expert_swiglu = packed_swiglu


@torch.library.custom_op("penjing::combine_experts", mutates_args=())
def combine_experts(y_RD: Tensor, row_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
    """sum_k weight_nk y[row_nk], [N, D], without gradients, summed in float32 in the order of k."""
    from penjing.kernels.triton import kernels

    y_RD, (count, chosen), width = y_RD.contiguous(), row_Nk.shape, y_RD.shape[1]
    out_ND, chunk = y_RD.new_empty(count, width), chunk_size(width)
    if count:
        _launch(
            *(kernels.combine_expert_rows, (count,)),
            *(y_RD, row_Nk.contiguous(), y_RD if weight_Nk is None else weight_Nk.contiguous(), out_ND, width),
            chosen=chosen,
            weighted=weight_Nk is not None,
            **_chunk_config(chunk),
        )
    return out_ND


@combine_experts.register_fake
def _(y_RD: Tensor, row_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
    return y_RD.new_empty(len(row_Nk), y_RD.shape[1])


@torch.library.custom_op("penjing::cross_entropy_inplace", mutates_args={"logits_CV"})
def cross_entropy_inplace(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor, with_grad: bool) -> Tensor:
    """weight * -log softmax(logits)[target] of each position, in float32. With `with_grad` its gradient for the logits,
    (softmax - one_hot) * weight, takes their place. Sums in float32, whatever the logits' dtype."""
    from penjing.kernels.triton import kernels

    rows, vocabulary = logits_CV.shape
    assert logits_CV.is_contiguous()
    loss_C = logits_CV.new_empty(rows, dtype=torch.float32)
    chunk = next(chunk for most, chunk in CHUNKS.items() if vocabulary <= most)
    if rows:
        _launch(
            *(kernels.cross_entropy_row, (rows,)),
            *(logits_CV, target_C, weight_C, loss_C, logits_CV.stride(0), vocabulary),
            with_grad=with_grad,
            **_chunk_config(chunk),
        )
    return loss_C


@cross_entropy_inplace.register_fake
def _(logits_CV: Tensor, target_C: Tensor, weight_C: Tensor, with_grad: bool) -> Tensor:
    return logits_CV.new_empty(logits_CV.shape[0], dtype=torch.float32)


@torch.library.custom_op("penjing::add_matmul", mutates_args={"into_MN"})
def _add_matmul(into_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """into += left @ right, of half precision into float32, without rounding the matmul first."""
    if into_MN.device.type == "cuda":
        torch.addmm(into_MN, left_MK, right_KN, out_dtype=into_MN.dtype, out=into_MN)
    else:
        into_MN += left_MK.to(into_MN.dtype) @ right_KN.to(into_MN.dtype)


@_add_matmul.register_fake
def _(into_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    return None


def add_matmul(grad_out_BO: Tensor, x_BN: Tensor, into_ON: Tensor) -> None:
    """into += grad_out^T x."""
    _add_matmul(into_ON, grad_out_BO.T, x_BN)
