"""Tries kernels on a small case before a run uses them: those that fail on this machine or compute something else are
switched off, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels import ops, reference
from penjing.kernels.attention_metadata import document_mask, first_keys, key_ranges
from penjing.kernels.cpu import library
from penjing.kernels.cpu import ops as cpu
from penjing.kernels.tiled_attention import tiled_attention
from penjing.kernels.triton import ops as gpu
from penjing.kernels.varlen_attention import supports_varlen, varlen_attention

NEWEST_FIRST = ("FA4", "FA3")
TRIED_TOKENS = 200  # of each of two rows
MAX_DIFFERENCE = 0.05  # in bfloat16, of values and gradients of size 1


class Heads(NamedTuple):
    """The shape of a model's attention. rms_norm_eps: of RMSNorm over each query and key head; None: there is none."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float | None = None


def activate_flash(heads: Heads, windows: Iterable[int], device: torch.device, dtype: torch.dtype) -> str:
    """Activate the newest FlashAttention that works for these heads; its name, or "" where torch's own (2) stays.

    Hopper and later only. An implementation that is there but gives wrong values or gradients, or none for this width
    of a head, is put back with a warning: early versions lacked windows and the backward pass of narrow heads.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if gpu.supports_attention(device, dtype, heads.head_dim):
        return ""
    if activate is None or device.type != "cuda" or not supports_varlen(device, dtype, heads.head_dim):
        return ""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return ""
    for name in NEWEST_FIRST:
        try:
            activate(name)
        except (ImportError, RuntimeError, ValueError):  # not installed, or not known to this torch
            continue
        try:
            wrong = max(varlen_difference(heads, window, device, dtype) for window in windows)
        except Exception as error:  # whatever a kernel that is not for this card raises
            reason = f"{type(error).__name__}: {error}"
        else:
            if wrong <= MAX_DIFFERENCE:
                return name
            reason = f"off by {wrong:.2g}"
        warnings.warn(f"{name} is installed but not used: {reason}", stacklevel=2)
        torch.nn.attention.restore_flash_attention_impl()
    return ""


def check_kernels(
    heads: Heads, rotary: tuple[Tensor, Tensor], vocab_size: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Try the kernels for this device. A line that says what they are used for, or on a CPU why they are not; empty:
    nothing to say. rotary: cosines and sines of TRIED_TOKENS positions."""
    on_cpu = _on_cpu(device, dtype)
    if not (dtype in cpu.TYPES if on_cpu else gpu.supports(device, dtype)):
        return ""
    if on_cpu and (why := library.unavailable_reason()):
        return f"steps take longer than they could: the C kernels for this CPU are missing, {why}"
    try:
        wrong = max(_attention_difference(heads, rotary, device, dtype), _head_difference(vocab_size, device, dtype))
        if on_cpu:
            wrong = max(wrong, _layer_difference(dtype))
    except Exception as error:  # whatever a compiler or a card has against them
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if wrong <= MAX_DIFFERENCE:
            used = ["attention"] if _attends(heads.head_dim, device, dtype) else []
            used += ["norms"] if on_cpu else []
            used += ["weight gradients"] if on_cpu and cpu.supports_weight_grad_in(dtype) else []
            return f"kernels of our own for {', '.join([*used, 'SwiGLU'])} and the head's softmax"
        reason = f"off by {wrong:.2g}"
    warnings.warn(f"kernels of our own are not used, torch's are: {reason}", stacklevel=2)
    (library if on_cpu else gpu).switch_off()
    return ""


def _on_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and not gpu.supports(device, dtype)  # it does where Triton interprets


def _attends(head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    if _on_cpu(device, dtype):
        return cpu.supports_attention(dtype, head_dim, torch.get_num_threads())
    return gpu.supports_attention(device, dtype, head_dim)


def _difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference between tensors that should be equal, relative to the largest value."""
    return max(float((one.float() - other).abs().max() / other.abs().max()) for one, other in pairs)


def _attention_difference(
    heads: Heads, rotary: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype
) -> float:
    """Of values and gradients from the reference in float32."""
    if not _attends(heads.head_dim, device, dtype):
        return 0.0
    generator = torch.Generator().manual_seed(1)
    shape = (2, rotary[0].shape[1])
    document_BT = (torch.rand(shape, generator=generator) < 0.02).long().cumsum(1).to(device)
    num_attention_heads, num_key_value_heads, size, epsilon = heads
    packed_BTJ = torch.randn(*shape, (num_attention_heads + 2 * num_key_value_heads) * size, generator=generator).to(
        device, dtype
    )
    upstream_BTHK = torch.randn(*shape, num_attention_heads, size, generator=generator).to(device, dtype)

    def run(kind: torch.dtype, kernel: bool) -> list[Tensor]:
        given_BTJ, gains = packed_BTJ.to(kind).requires_grad_(), None
        if epsilon is not None:
            gains = torch.ones(size, device=device).requires_grad_(), torch.ones(size, device=device).requires_grad_()
        parts = torch.split(
            given_BTJ, [num_attention_heads * size, num_key_value_heads * size, num_key_value_heads * size], dim=-1
        )
        q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in parts)
        if kernel and not _on_cpu(device, dtype):
            ranges = key_ranges(document_BT)
            out = gpu.fused_qk_norm_rope_attention(
                given_BTJ, gains, epsilon or 0.0, rotary, ranges, num_attention_heads, num_key_value_heads
            )
            return [out.detach(), *torch.autograd.grad(out, (given_BTJ, *(gains or ())), upstream_BTHK.to(kind))]
        norm = ops.rms_norm if kernel else reference.rms_norm
        if gains is not None and epsilon is not None:
            q, k = (norm(x, gain, epsilon, kind) for x, gain in zip((q, k), gains, strict=True))
        if kernel:
            out = tiled_attention(q, k, v, document_BT, rotary=rotary, first_BT=first_keys(document_BT, 0))
        else:
            q, k = ops.apply_rope(q, *rotary), ops.apply_rope(k, *rotary)
            out = reference.attention(q, k.transpose(1, 2), v.transpose(1, 2), document_mask(document_BT))
        return [out.detach(), *torch.autograd.grad(out, (given_BTJ, *(gains or ())), upstream_BTHK.to(kind))]

    return _difference(zip(run(dtype, True), run(torch.float32, False), strict=True))


def _head_difference(vocab_size: int, device: torch.device, dtype: torch.dtype) -> float:
    """The same of the cross-entropy and its gradients."""
    generator = torch.Generator().manual_seed(1)
    logits_CV = (4 * torch.randn(16, vocab_size, generator=generator)).to(device, dtype)
    target_C = torch.randint(vocab_size, (16,), generator=generator).to(device)
    wide_CV = logits_CV.to(torch.float32, copy=True).requires_grad_()
    wanted_C = functional.cross_entropy(wide_CV, target_C, reduction="none")
    (grad_CV,) = torch.autograd.grad(wanted_C.sum(), wide_CV)
    cross_entropy_inplace = cpu.cross_entropy_inplace if _on_cpu(device, dtype) else gpu.cross_entropy_inplace
    got_C = cross_entropy_inplace(logits_CV, target_C, torch.ones(16, device=device), True)
    return _difference(((got_C, wanted_C.detach()), (logits_CV, grad_CV)))


def _layer_difference(dtype: torch.dtype) -> float:
    """The same of a norm, SwiGLU and a weight's gradient on a CPU."""
    generator = torch.Generator().manual_seed(1)
    x_ND, upstream_ND = torch.randn(2, 40, 96, generator=generator)

    def run(plain: bool) -> list[Tensor]:
        x, gain = x_ND.clone().requires_grad_(), torch.ones(96).requires_grad_()
        if plain:
            y = reference.rms_norm(x, gain, 1e-6, torch.float32)
            out = reference.swiglu(y, y)
        else:
            y = ops.rms_norm(x, gain, 1e-6, dtype)
            out = ops.swiglu(y, y).float()
        return [out.detach(), *torch.autograd.grad(out, (x, gain), upstream_ND)]

    pairs = [*zip(run(False), run(True), strict=True)]
    grad_out_BO, x_BN = torch.randn(2, 200, 96, generator=generator).to(dtype)
    if cpu.supports_weight_grad(grad_out_BO, x_BN):
        pairs.append((cpu.weight_grad(grad_out_BO, x_BN), grad_out_BO.float().T @ x_BN.float()))
    return _difference(pairs)


def varlen_difference(heads: Heads, window: int, device: torch.device, dtype: torch.dtype) -> float:
    """Of values and gradients on two small rows, between the kernel and the masked reference in float32."""
    generator = torch.Generator().manual_seed(1)
    document_BT = (torch.rand(2, 256, generator=generator) < 0.02).long().cumsum(1)
    edges = [0] + [i + 1 for i in range(511) if i == 255 or document_BT.flatten()[i] != document_BT.flatten()[i + 1]]
    cu_seqlens_S = torch.tensor([*edges, 512, 512], dtype=torch.int32, device=device)
    queries, keys, size, _ = heads
    made = [torch.randn(2, 256, count, size, generator=generator) for count in (queries, keys, keys, queries)]
    *given, upstream = (x.to(device, dtype) for x in made)

    def run(kind: torch.dtype, kernel: bool) -> list[Tensor]:
        q, k, v = (x.to(kind).requires_grad_() for x in given)
        if kernel:
            out = varlen_attention(q, k, v, cu_seqlens_S, 256, window)
        else:
            mask = document_mask(document_BT.to(device), window)
            out = reference.attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.to(kind))]

    return _difference(zip(run(dtype, True), run(torch.float32, False), strict=True))
