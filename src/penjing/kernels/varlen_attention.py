"""Attention over packed documents by torch's variable-length kernel on CUDA (FlashAttention 2)."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # from torch 2.12 on


def supports_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `varlen_attention` serves such queries: half precision on a card that FlashAttention runs on."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim > 256 or head_dim % 8:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cu_seqlens_S: Tensor, longest: int, window: int = 0
) -> Tensor:
    """out_BTHK by torch's variable-length kernel.

    cu_seqlens_S: where each document starts in the rows laid end to end, then their end, int32; repeats of the end are
    documents of no tokens. longest: at least the length of the longest. window: as in `tiled_attention`; the left side
    of the kernel's leaves the query's own position out.
    """
    repeats = q_BTHK.shape[2] // k_BTGK.shape[2]
    more: dict[str, Any] = {"enable_gqa": True} if repeats > 1 and KNOWS_GROUPS else {}
    if repeats > 1 and not KNOWS_GROUPS:
        k_BTGK, v_BTGK = (x.repeat_interleave(repeats, dim=2) for x in (k_BTGK, v_BTGK))
    q_NHK, k_NGK, v_NGK = (x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGK))
    edges, size = (cu_seqlens_S, cu_seqlens_S, longest, longest), (window - 1 if window else -1, 0)
    out_NHK = cast(Tensor, varlen_attn(q_NHK, k_NGK, v_NGK, *edges, window_size=size, **more))
    return out_NHK.view(q_BTHK.shape)
