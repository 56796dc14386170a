"""Attention over packed documents by torch's variable-length kernel, on CUDA: FlashAttention 2, or 3 and 4 where
active."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """torch's kernel (2.10 and later) with the names of its arguments; None where it is not there."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def supports_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, window: int = 0) -> bool:
    """Whether `varlen_attention` serves such queries: half precision on a card that FlashAttention runs on."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim > 256 or head_dim % 8:
        return False
    found = _varlen()
    if found is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return "window_size" in found[1] or ("is_causal" in found[1] and not window)


def varlen_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, cu_seqlens_S: Tensor, longest: int, window: int = 0
) -> Tensor:
    """out_BTHK by torch's variable-length kernel (FlashAttention 2; 3 or 4 where activated).

    cu_seqlens_S: where each document starts in the rows laid end to end, then their end, int32; repeats of the end are
    documents of no tokens. longest: at least the length of the longest. window: as in `tiled_attention`.
    """
    found = _varlen()
    assert found is not None, "ask supports_varlen first"
    return call_varlen(*found, q_BTHK, k_BTGK, v_BTGK, cu_seqlens_S, longest, window)


def call_varlen(
    kernel: Callable[..., Any],
    names: frozenset[str],
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    cu_seqlens_S: Tensor,
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
    out_NHK: Tensor = kernel(q_NHK, k_NGK, v_NGK, cu_seqlens_S, cu_seqlens_S, longest, longest, **more)
    return out_NHK.view(q_BTHK.shape)
