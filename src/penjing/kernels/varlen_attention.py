"""Attention over packed documents by torch's variable-length kernel on CUDA (FlashAttention 2)."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from penjing.kernels.attention_metadata import AttentionInputs, AttentionMetadata


@cache
def _kernel() -> tuple[Callable[..., Any], bool]:
    """torch's kernel, and whether it takes `enable_gqa` (from torch 2.12 on)."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo: 70 MiB, 2 seconds

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def supports(op: str, asked: AttentionInputs) -> str:
    """Why the kernel does not take these documents; empty: half precision on a GPU that FlashAttention supports."""
    if asked.device.type != "cuda":
        return "for GPUs only"
    if asked.cu_seqlens_S is None or asked.subtree_end_BT is not None:
        return "for packed documents of known lengths only"
    head_dim = asked.heads[1]
    if asked.dtype not in (torch.bfloat16, torch.float16) or head_dim > 256 or head_dim % 8:
        return "for half precision, and heads of 8, 16, ... 256 dimensions"
    capable = torch.cuda.get_device_capability(asked.device) >= (8, 0)
    return "" if capable else "for cards of compute capability 8.0 or later"


def attention_metadata(asked: AttentionInputs) -> AttentionMetadata:
    return AttentionMetadata(backend="torch, by lengths", cu_seqlens_S=asked.cu_seqlens_S, window=asked.window)


def attention(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, metadata: AttentionMetadata) -> Tensor:
    assert metadata.cu_seqlens_S is not None
    return varlen_attention(q_BTHK, k_BTGK, v_BTGK, metadata.cu_seqlens_S, q_BTHK.shape[1], metadata.window)


def varlen_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cu_seqlens_S: Tensor, longest: int, window: int = 0
) -> Tensor:
    """out_BTHK by torch's variable-length kernel.

    cu_seqlens_S: where each document starts in the concatenated rows, then their end, int32; repeats of the end are
    empty documents. longest: an upper bound of document lengths. window: as in `tiled_attention`; the kernel's left
    window does not count the query's own position.
    """
    kernel, has_gqa = _kernel()
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    gqa: dict[str, Any] = {"enable_gqa": True} if repeats > 1 and has_gqa else {}
    if repeats > 1 and not has_gqa:
        k_BTGK, v_BTGK = (x.repeat_interleave(repeats, dim=2) for x in (k_BTGK, v_BTGK))
    q_NHK, k_NGK, v_NGK = (x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
    lengths, size = (cu_seqlens_S, cu_seqlens_S, longest, longest), (window - 1 if window else -1, 0)
    out_NHK = cast(Tensor, kernel(q_NHK, k_NGK, v_NGK, *lengths, window_size=size, **gqa))
    return out_NHK.view(q_BTHK.shape)
