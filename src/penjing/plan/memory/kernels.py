"""Temporary memory of GPU kernels, which torch's meta functions do not show.

Sources: pytorch's `flash_attn/flash_api.cpp` (mha_bwd), `attention_backward.cu`, `Embedding.cu`, and calls of cuBLAS.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from penjing.kernels.triton.ops import POSITIONS

WORKSPACE = -1  # placeholder for the size of a cuBLAS workspace, which depends on the device

_MATMULS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_grouped_mm", "aten::addmm_")


def is_matmul(name: str) -> bool:
    """Whether an operation calls cuBLAS (and thus allocates its workspace)."""
    return name.split(".")[0] in _MATMULS


def temporaries(name: str, args: tuple[Any, ...], out: Any) -> Iterator[int]:
    """Sizes in bytes of the temporaries that an operation's GPU kernel allocates while it runs."""
    name = name.split(".")[0]
    if name in (
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
    ):
        query_BHTK, key_BGSK = args[1], args[2]
        rows, heads, tokens, width = query_BHTK.shape
        yield from _flash_backward(rows, heads, tokens, key_BGSK.shape[2], width, key_BGSK)
    elif name in ("torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"):
        query_NHK, key_NGK = args[1], args[2]
        tokens, heads, width = query_NHK.shape[-3:]
        yield from _flash_backward(1, heads, tokens, key_NGK.shape[-3], width, key_NGK, key_heads_at=-2)
    elif name == "aten::_scaled_dot_product_efficient_attention_backward":
        query_BHTK = args[1]
        rows, heads, tokens, width = query_BHTK.shape
        yield rows * heads * tokens * 4  # delta, the row sums of out * grad out
        if query_BHTK.element_size() < 4:
            yield rows * heads * tokens * width * 4  # the query gradient is accumulated in float32
    elif name == "penjing::fused_qk_norm_rope_attention_backward":
        packed_BTJ, (_, q_BTHK, k_BTGK, norm_BHT) = args[1], args[5]
        yield norm_BHT.numel() * 4  # delta
        for value in (q_BTHK, k_BTGK, k_BTGK):  # gradients, before they are concatenated
            yield value.numel() * value.element_size()
        yield -(-packed_BTJ.shape[0] * packed_BTJ.shape[1] // POSITIONS) * packed_BTJ.shape[-1] * 4  # gains' sums
    elif name == "aten::embedding_dense_backward":
        indices = args[1]
        if indices.numel() > 3072:  # fewer are not sorted
            for _ in range(4):  # indices and positions, before and after the sort
                yield indices.numel() * indices.element_size()


def _flash_backward(
    rows: int, heads: int, tokens: int, keys: int, width: int, key: Tensor, key_heads_at: int = 1
) -> Iterator[int]:
    rounded_tokens, rounded_width = _round(tokens, 128), _round(width, 32)
    yield rows * heads * rounded_tokens * 4  # softmax_d
    yield rows * heads * rounded_tokens * rounded_width * 4  # dq_accum
    if key.shape[key_heads_at] != heads:
        for _ in range(2):  # dk and dv of every query head, summed by key head at the end
            yield rows * heads * keys * width * key.element_size()


def _round(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
