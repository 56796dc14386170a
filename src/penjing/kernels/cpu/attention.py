"""Attention over packed rows by the C kernel (attention.c): scores are recomputed tile by tile, and none is saved."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels import tiled_attention
from penjing.kernels.attention_metadata import (
    TILE,
    AttentionInputs,
    AttentionMetadata,
    QKNorm,
    Rotary,
    first_keys,
    normalised_heads,
)
from penjing.kernels.cpu import ops as cpu


def supports(op: str, asked: AttentionInputs) -> str:
    """Why the kernel does not take these documents; empty: it does."""
    if asked.device.type != "cpu":
        return "for CPUs only"
    if asked.subtree_end_BT is not None:
        if asked.window or asked.document_BT is not None or torch.is_grad_enabled():
            return "for trees without documents, a window and gradients"
    elif asked.plain_documents() is None:
        return "for packed documents only"
    num_key_value_heads, head_dim = asked.heads
    return cpu.attention_reason(asked.dtype, head_dim, len(asked.position_BT) * num_key_value_heads)


def attention_metadata(asked: AttentionInputs) -> AttentionMetadata:
    if (end_BT := asked.subtree_end_BT) is not None:
        padding = torch.arange(end_BT.shape[1], -(-end_BT.shape[1] // TILE) * TILE, dtype=torch.int32)
        first_BT, end_BT = (
            torch.cat([x.int(), (padding + i).expand(len(end_BT), -1)], dim=1)
            for i, x in enumerate((torch.zeros_like(end_BT), end_BT))
        )
        return AttentionMetadata(backend="C, in tiles", first_BT=first_BT, subtree_end_BT=end_BT)
    assert asked.document_BT is not None
    first_BT = first_keys(asked.document_BT, asked.window)
    return AttentionMetadata(
        backend="C, in tiles", first_BT=first_BT, document_BT=asked.document_BT, window=asked.window
    )


def fused_attention(
    qkv: tuple[Tensor, ...],
    num_heads: int,
    num_key_value_heads: int,
    norm: QKNorm | None,
    rotary: Rotary | None,
    metadata: AttentionMetadata,
) -> Tensor:
    """Queries and keys are rotated on their way into tiles. In a compiled block, whose metadata are made outside of
    it, torch computes the tiles."""
    if torch.compiler.is_compiling():
        return tiled_attention.fused_attention(qkv, num_heads, num_key_value_heads, norm, rotary, metadata)
    assert metadata.first_BT is not None
    heads = normalised_heads(qkv, num_heads, num_key_value_heads, norm)
    return document_attention(*heads, metadata.first_BT, rotary, metadata.subtree_end_BT)


def document_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    first_BT: Tensor,
    rotary: Rotary | None = None,
    subtree_end_BT: Tensor | None = None,
) -> Tensor:
    """out_BTHK = softmax(q k^T / sqrt(K)) v. first_BT: `first_keys` of the documents. subtree_end_BT: of trees."""
    q_BTHK, k_BTGK, v_BTGK = (x.contiguous() for x in (q_BTHK, k_BTGK, v_BTGK))
    inputs = q_BTHK, k_BTGK, v_BTGK, first_BT, rotary, subtree_end_BT
    return _KernelAttention.apply(*inputs)  # type: ignore[no-any-return,no-untyped-call]


class _KernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        first_BT: Tensor,
        rotary: Rotary | None,
        subtree_end_BT: Tensor | None,
    ) -> Tensor:
        rotaries = zip((q_BTHK, k_BTGK, v_BTGK), (rotary, rotary, None), strict=True)
        q_NHTK, k_NGTK, v_NGTK = (cpu.tiles_of(x, rotary) for x, rotary in rotaries)
        out_NHTK, norm_NHT = cpu.attention(q_NHTK, k_NGTK, v_NGTK, first_BT, subtree_end_BT)
        out_BTHK = cpu.rows_of(out_NHTK, q_BTHK.shape[1], q_BTHK.dtype, None)
        ctx.rotary = rotary
        ctx.save_for_backward(q_NHTK, k_NGTK, v_NGTK, out_BTHK, norm_NHT, first_BT)
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q_NHTK, k_NGTK, v_NGTK, out_BTHK, norm_NHT, first_BT = ctx.saved_tensors
        num_tokens, dtype = out_BTHK.shape[1], out_BTHK.dtype
        grad_out_NHTK, out_NHTK = (cpu.tiles_of(x, None) for x in (upstream[0].contiguous(), out_BTHK))
        grads = cpu.attention_backward(grad_out_NHTK, q_NHTK, k_NGTK, v_NGTK, out_NHTK, norm_NHT, first_BT)
        rotaries = zip(grads, (ctx.rotary, ctx.rotary, None), strict=True)
        return (*(cpu.rows_of(x, num_tokens, dtype, rotary) for x, rotary in rotaries), None, None, None)
