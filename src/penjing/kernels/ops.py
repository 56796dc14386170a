"""The entry point of all ops with several backends. Only this file selects a backend for each call.

| op | backends, in this order | reference |
|---|---|---|
| rms_norm, swiglu, apply_rope, residual_add, linear | C (CPU), Triton (CUDA), torch | reference.py |
| attention | Triton, varlen (CUDA), C, tiles (CPU), torch | reference.attention |
| experts | expert by expert in C (CPU), grouped with Triton, grouped (CUDA) | reference.experts |
| fused_linear_cross_entropy, log_probs | C, Triton, torch in blocks | torch's cross_entropy |
| nesterov_update, decayed_update | C, torch | reference.py |
| decode (a forward pass of generation) | C (CPU: cpu/decode.py), torch | model/transformer.py |

`backends(device, dtype)` says which of them this machine uses. Ops take tensors and numbers, never modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels import autograd_functions as autograd
from penjing.kernels import reference
from penjing.kernels.attention_metadata import AttentionMetadata, make_attention_metadata
from penjing.kernels.autograd_functions import apply_rope
from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.dispatch import saves_memory, uses_manual_backward
from penjing.kernels.experts import experts
from penjing.kernels.fp8 import linear_float8
from penjing.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy, log_probs, logits
from penjing.kernels.orthogonalize import Orthogonalize, stack_height
from penjing.kernels.tiled_attention import tiled_attention
from penjing.kernels.triton import ops as gpu
from penjing.kernels.varlen_attention import supports_varlen, varlen_attention

__all__ = [
    "AttentionMetadata",
    "Backend",
    "Orthogonalize",
    "QKNorm",
    "apply_rope",
    "attention",
    "backends",
    "decayed_update",
    "experts",
    "fused_linear_cross_entropy",
    "global_norm",
    "linear",
    "log_probs",
    "logits",
    "make_attention_metadata",
    "nesterov_update",
    "packs_gate_and_up",
    "residual_add",
    "rms_norm",
    "rms_norm_with_residual",
    "shared_input_linears",
    "shares_input",
    "stack_height",
    "swiglu",
    "swiglu_linear",
]
Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [B or 1, T, 1, n]


def rms_norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension (arXiv:1910.07467, equation 4), in `dtype`.

    The statistics are in float32 whatever the input.
    """
    if uses_manual_backward(x):
        return rms_norm_with_residual(x, gain, epsilon, dtype)[1]
    return reference.rms_norm(x, gain, epsilon, dtype)


def rms_norm_with_residual(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and its norm, for a residual stream: on a CPU one kernel adds both gradients of x."""
    if not uses_manual_backward(x):
        return x, reference.rms_norm(x, gain, epsilon, dtype)
    return autograd.RMSNormFunction.apply(x, gain, epsilon, dtype)  # type: ignore[no-any-return,no-untyped-call]


def residual_add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in the wider dtype of the two."""
    if saves_memory(x) or (uses_manual_backward(x) and cpu.supports(y, float32=[x])):
        return autograd.ResidualAddFunction.apply(x, y)  # type: ignore[no-any-return,no-untyped-call]
    return x + y


def linear(
    x: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    cast_OI: Tensor | None = None,
    fp8: bool = False,
) -> Tensor:
    """x W^T + b in `dtype`. cast_OI: the weight in `dtype`, used where no gradient is taken. fp8: use float8 when
    gradients are taken (see fp8.py)."""
    bias_O = None if bias_O is None else bias_O.to(dtype)
    if cast_OI is not None and not torch.is_grad_enabled():
        return functional.linear(x.to(dtype), cast_OI, bias_O)
    if fp8 and torch.is_grad_enabled():
        out = linear_float8(x.to(dtype), weight_OI)
    elif saves_memory(x):
        (out,) = autograd.LinearsFunction.apply(x, dtype, weight_OI)  # type: ignore[no-untyped-call]
    else:
        return functional.linear(x.to(dtype), weight_OI.to(dtype), bias_O)
    return out if bias_O is None else out + bias_O


def shares_input(x: Tensor) -> bool:
    """Whether linear layers with the same input go through `shared_input_linears`."""
    return saves_memory(x) and torch.is_grad_enabled()


def shared_input_linears(
    x: Tensor, dtype: torch.dtype, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """x W^T + b for each of several layers; each gradient of x is added by its matmul."""
    outs = autograd.LinearsFunction.apply(x, dtype, *weights_OI)  # type: ignore[no-untyped-call]
    return tuple(out if bias is None else out + bias.to(dtype) for out, bias in zip(outs, biases_O, strict=True))


def packs_gate_and_up(x: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether `swiglu` takes gate and up concatenated in one tensor. Not without gradients: generation has few tokens
    in a pass, and would concatenate the weights for each pass."""
    return torch.is_grad_enabled() and gpu.supports(x.device, dtype)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202, equation 6, without the matrices). up None: both in one tensor, [..., 2F]."""
    if up is None:
        inner: Tensor = gpu.swiglu(gate)
        return inner
    if uses_manual_backward(gate):
        return autograd.SwiGLUFunction.apply(gate, up)  # type: ignore[no-any-return,no-untyped-call]
    return reference.swiglu(gate, up)


def swiglu_linear(
    gate_and_up: Sequence[Tensor], down: Callable[[Tensor], Tensor], weight_DF: Tensor | None = None
) -> Tensor:
    """down(silu(gate) * up). gate_and_up: as `swiglu` takes them. weight_DF: W if down(x) is just x W^T."""
    if weight_DF is not None and len(gate_and_up) == 2 and saves_memory(gate_and_up[0]):
        return autograd.SwiGLULinearFunction.apply(*gate_and_up, weight_DF)  # type: ignore[no-any-return,no-untyped-call]
    return down(swiglu(*gate_and_up))


class QKNorm(NamedTuple):
    """RMSNorm of each query and key head: gains and epsilon."""

    q_gain_K: Tensor
    k_gain_K: Tensor
    epsilon: float


def attention(
    qkv: Sequence[Tensor],
    num_attention_heads: int,
    num_key_value_heads: int,
    norm: QKNorm | None,
    rotary: Rotary,
    metadata: AttentionMetadata,
    cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """out_BTHK = softmax(rope(norm(q)) rope(norm(k))^T / sqrt(K)) v over the keys that `metadata` allows for a query
    (arXiv:1706.03762, equation 1).

    qkv: q, k and v, [B, T, heads x K] each, or all concatenated in one if `metadata.packed`. cache: stores new keys
    and values, and returns all, block_BGSK.
    """
    if metadata.ranges is not None:
        gains, epsilon = (None, 0.0) if norm is None else (norm[:2], norm.epsilon)
        return gpu.fused_qk_norm_rope_attention(
            qkv[0], gains, epsilon, rotary, metadata.ranges, num_attention_heads, num_key_value_heads
        )
    counts, (rows, num_tokens, width) = (num_attention_heads, num_key_value_heads, num_key_value_heads), qkv[0].shape
    size = width // num_attention_heads
    q_BTHK, k_BTGK, v_BTGK = (x.view(rows, num_tokens, count, size) for x, count in zip(qkv, counts, strict=True))
    if norm is not None:
        q_BTHK = rms_norm(q_BTHK, norm.q_gain_K, norm.epsilon, q_BTHK.dtype)
        k_BTGK = rms_norm(k_BTGK, norm.k_gain_K, norm.epsilon, k_BTGK.dtype)
    if metadata.document_BT is not None:
        args = (metadata.document_BT, metadata.mask_B1TS, metadata.window, metadata.groups, rotary, metadata.first_BT)
        return tiled_attention(q_BTHK, k_BTGK, v_BTGK, *args)
    q_BTHK, k_BTGK = apply_rope(q_BTHK, *rotary), apply_rope(k_BTGK, *rotary)
    if cache is not None:
        k_BGSK, v_BGSK = (x.to(q_BTHK.dtype) for x in cache(k_BTGK, v_BTGK))
        attend = reference.cached_attention if qkv[0].device.type == "cuda" else reference.attention
        return attend(q_BTHK, k_BGSK, v_BGSK, metadata.mask_B1TS)
    if metadata.cu_seqlens_S is not None:
        return varlen_attention(q_BTHK, k_BTGK, v_BTGK, metadata.cu_seqlens_S, num_tokens, metadata.window)
    return reference.attention(q_BTHK, k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), metadata.mask_B1TS)


def nesterov_update(gradient: Tensor, mean: Tensor, out: Tensor, momentum: float) -> None:
    """mean <- momentum mean + (1 - momentum) gradient; out <- momentum mean + (1 - momentum) gradient of the new
    mean."""
    if cpu.supports(float32=[gradient, mean, out]):
        cpu.nesterov_update(gradient, mean, out, momentum)
    else:
        reference.nesterov_update(gradient, mean, out, momentum)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all numbers in the tensors, in float32."""
    if tensors and cpu.supports(float32=tensors):
        return torch.cat([cpu.sum_squares(tensor) for tensor in tensors]).sum().sqrt().float()
    return reference.global_norm(tensors)


def decayed_update(
    parameters: Sequence[Tensor], update_EMN: Tensor, decay: float, rate: float, scale: float, bad: Tensor | None = None
) -> None:
    """w <- decay w - rate scale update, for each parameter and its matrix of a stack of updates in any dtype. bad: 1 on
    the device if the update must be skipped; None: never skip."""
    if bad is None and cpu.supports(update_EMN, float32=parameters):
        for parameter, update_MN in zip(parameters, update_EMN, strict=True):
            cpu.add_scaled(parameter, update_MN, float(decay), -rate * scale)
        return
    update_EMN = update_EMN.to(parameters[0].dtype)  # in two steps: the stack in half precision is freed between them
    update_EMN = update_EMN * scale
    decay_factor: float | Tensor = decay
    if bad is not None:
        update_EMN = torch.where(bad > 0, torch.zeros_like(update_EMN), update_EMN)
        decay_factor = torch.where(bad > 0, 1.0, decay)
    for parameter, update_MN in zip(parameters, update_EMN, strict=True):
        parameter.mul_(decay_factor).sub_(update_MN, alpha=rate)


class Backend(NamedTuple):
    """Which implementation an op has on a device."""

    op: str
    name: str
    why: str


def backends(device: torch.device, dtype: torch.dtype) -> list[Backend]:
    """The backend of each op in training on `device`, with matmuls in `dtype` and heads of 64 dimensions."""
    if device.type == "cpu":
        return _on_cpu(dtype)
    if gpu.supports(device, dtype):
        why = "an NVIDIA card of compute capability 8.0 or later, in half precision"
        return [
            Backend("attention", "Triton", why),
            Backend("rope, query and key norm", "Triton", "fused with attention"),
            Backend("swiglu", "Triton", why),
            Backend("cross_entropy", "Triton", why),
            Backend("experts", "grouped matmuls and Triton", why),
            Backend("rms_norm", "torch", "torch's own kernel is one launch"),
            Backend("linear", "torch", "cuBLAS"),
        ]
    why = f"no Triton kernels for {str(dtype).removeprefix('torch.')} on this {device.type} device"
    varlen = ("varlen", "torch's FlashAttention for packed documents")
    return [
        *(Backend(op, "torch", why) for op in ("rms_norm", "swiglu", "cross_entropy", "linear")),
        Backend("attention", *(varlen if supports_varlen(device, dtype, 64) else ("torch", why))),
        Backend("experts", "torch, grouped matmuls", why),
    ]


def _on_cpu(dtype: torch.dtype) -> list[Backend]:
    missing = library.unavailable_reason()
    if not missing and dtype not in cpu.TYPES:
        missing = f"the C kernels take float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    name, why = ("torch, in chunks", missing) if missing else ("C", "built for this processor")
    has_attention = cpu.supports_attention(dtype, 64, 8)
    tiles = missing or "the C kernel does not take this dtype on this processor or these threads"
    no_decode = library.unavailable_decode_reason() or missing
    has_amx = not missing and cpu.supports_weight_grad_in(dtype)
    amx = "matrix units (AMX)" if has_amx else "the C kernel is for bfloat16 on processors with AMX"
    return [
        *(Backend(op, name, why) for op in ("rms_norm", "swiglu", "residual_add", "cross_entropy", "muon update")),
        Backend("attention", *(("C", why) if has_attention else ("torch, in tiles", tiles))),
        Backend("rope", name, missing or "fused with attention"),
        Backend("linear", "torch", "oneDNN or MKL"),
        Backend("decode", *(("torch", no_decode) if no_decode else ("C", "one call a pass"))),
        Backend("weight gradients", "C" if has_amx else "torch", amx),
        Backend("experts", "expert by expert", "one core each; SwiGLU as above"),
    ]
