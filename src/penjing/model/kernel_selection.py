"""Which kernels a run uses: our own, or FlashAttention 4 or 3 behind torch's attention, where they compute what they
should on this card."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from penjing.kernels.cpu import ops as cpu
from penjing.kernels.document_attention import has_varlen, tiled_attention, varlen_attention
from penjing.kernels.triton import ops as gpu
from penjing.model.attention import document_mask, plain_attention
from penjing.model.config import ModelConfig
from penjing.model.mlp import gated
from penjing.model.norm import RMSNorm
from penjing.model.rope import rotary_table, rotate

NEWEST_FIRST = ("FA4", "FA3")
TRIED_TOKENS = 200  # of each of two rows, to see whether kernels of our own work
LARGEST_DIFFERENCE = 0.05  # in bfloat16, of values and gradients of size 1


def activate_flash(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Activate the newest that works for the model's heads; its name, or "" where torch's own (2) stays.

    Hopper and later only. An implementation that is there but gives wrong values or gradients, or none for this width
    of a head, is put back with a warning: early versions lacked windows and the backward pass of narrow heads.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    config = getattr(model, "config", None)
    if config is None or gpu.serves_attention(device, dtype, config.head_size):
        return ""
    if activate is None or device.type != "cuda" or not has_varlen(device, dtype, config.head_size):
        return ""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return ""
    windows = {config.window(layer) for layer in range(config.num_layers)}
    for name in NEWEST_FIRST:
        try:
            activate(name)
        except (ImportError, RuntimeError, ValueError):  # not installed, or not known to this torch
            continue
        try:
            heads = (config.num_heads, config.num_kv_heads, config.head_size)
            wrong = max(largest_difference(*heads, window, device, dtype) for window in windows)
        except Exception as error:  # whatever a kernel that is not for this card raises
            said = f"{type(error).__name__}: {error}"
        else:
            if wrong <= LARGEST_DIFFERENCE:
                return name
            said = f"off by {wrong:.2g}"
        warnings.warn(f"{name} is installed but not used: {said}", stacklevel=2)
        torch.nn.attention.restore_flash_attention_impl()
    return ""


def check_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Try kernels of our own (kernels/triton/ops.py, kernels/cpu/ops.py) on a small case of the model's heads. Where
    they fail on this machine or are wrong they are switched off, with a warning. A line that says what they are used
    for, or on a CPU why they are not; empty: nothing to say."""
    config = getattr(model, "config", None)
    if config is None:
        return ""
    on_cpu = _on_cpu(device, dtype)
    if not (dtype in cpu.TYPES if on_cpu else gpu.serves(device, dtype)):
        return ""
    if on_cpu and (why := cpu.why_not()):
        return f"steps take longer than they could: kernels of our own for this CPU are missing, {why}"
    try:
        wrong = max(_wrong_attention(config, device, dtype), _wrong_head(config.vocabulary_size, device, dtype))
        if on_cpu:
            wrong = max(wrong, _wrong_layers(dtype))
    except Exception as error:  # whatever a compiler or a card has against them
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if wrong <= LARGEST_DIFFERENCE:
            used = ["attention"] if _attends(config, device, dtype) else []
            used += ["norms"] if on_cpu else []
            used += ["weights' gradients"] if on_cpu and cpu.takes_weights(dtype) else []
            return f"kernels of our own for {', '.join([*used, 'SwiGLU'])} and the head's softmax"
        said = f"off by {wrong:.2g}"
    warnings.warn(f"kernels of our own are not used, torch's are: {said}", stacklevel=2)
    (cpu if on_cpu else gpu).switch_off()
    return ""


def _on_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and not gpu.serves(device, dtype)  # as it does where Triton interprets


def _attends(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    if _on_cpu(device, dtype):
        return cpu.serves_attention(dtype, config.head_size, torch.get_num_threads())
    return gpu.serves_attention(device, dtype, config.head_size)


def _wrong_attention(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> float:
    """The largest difference of values and gradients from the plain parts in float32, by the largest value."""
    if not _attends(config, device, dtype):
        return 0.0
    generator = torch.Generator().manual_seed(1)
    shape = (2, TRIED_TOKENS)
    document_BT = (torch.rand(shape, generator=generator) < 0.02).long().cumsum(1).to(device)
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_size
    joined_BTJ = torch.randn(*shape, (heads + 2 * groups) * size, generator=generator).to(device, dtype)
    upstream_BTHK = torch.randn(*shape, heads, size, generator=generator).to(device, dtype)
    rotary = rotary_table(torch.arange(TRIED_TOKENS, device=device)[None], config)

    def run(kind: torch.dtype, kernel: bool) -> list[Tensor]:
        given_BTJ, gains = joined_BTJ.to(kind).requires_grad_(), None
        norms = [RMSNorm(size, config.norm_epsilon).to(device) for _ in range(2)]
        if config.normalises_heads:
            gains = norms[0].weight, norms[1].weight
            norms[0].compute_dtype = norms[1].compute_dtype = kind
        parts = torch.split(given_BTJ, [heads * size, groups * size, groups * size], dim=-1)
        q, k, v = (x.reshape(*x.shape[:2], -1, size) for x in parts)
        if kernel and _on_cpu(device, dtype):
            q, k = (norms[0](q), norms[1](k)) if gains else (q, k)
            first_BT = cpu.first_keys(document_BT, 0)
            out = tiled_attention(q, k, v, document_BT, rotary=rotary, first_BT=first_BT)
        elif kernel:
            edges = gpu.document_edges(document_BT)
            out = gpu.heads_and_attention(given_BTJ, gains, config.norm_epsilon, rotary, edges, heads, groups)
        else:
            if gains:
                q, k = (
                    functional.rms_norm(x, (size,), gain, config.norm_epsilon)
                    for x, gain in zip((q, k), gains, strict=True)
                )
            q, k = rotate(q, *rotary), rotate(k, *rotary)
            out = plain_attention(q, k.transpose(1, 2), v.transpose(1, 2), document_mask(document_BT))
        return [out.detach(), *torch.autograd.grad(out, (given_BTJ, *(gains or ())), upstream_BTHK.to(kind))]

    pairs = zip(run(dtype, True), run(torch.float32, False), strict=True)
    return max(float((one.float() - other).abs().max() / other.abs().max()) for one, other in pairs)


def _wrong_head(vocabulary: int, device: torch.device, dtype: torch.dtype) -> float:
    """The same of the softmax's losses and slopes."""
    generator = torch.Generator().manual_seed(1)
    logits_CV = (4 * torch.randn(16, vocabulary, generator=generator)).to(device, dtype)
    target_C = torch.randint(vocabulary, (16,), generator=generator).to(device)
    wide_CV = logits_CV.to(torch.float32, copy=True).requires_grad_()
    wanted_C = functional.cross_entropy(wide_CV, target_C, reduction="none")
    (slope_CV,) = torch.autograd.grad(wanted_C.sum(), wide_CV)
    nats_in_place = cpu.nats_in_place if _on_cpu(device, dtype) else gpu.nats_in_place
    got_C = nats_in_place(logits_CV, target_C, torch.ones(16, device=device), True)
    pairs = ((got_C, wanted_C.detach()), (logits_CV.float(), slope_CV))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _wrong_layers(dtype: torch.dtype) -> float:
    """The same of a norm, a gated product and a weight's gradient on a CPU."""
    generator = torch.Generator().manual_seed(1)
    x_ND, upstream_ND = torch.randn(2, 40, 96, generator=generator)

    def run(plain: bool) -> list[Tensor]:
        x, norm = x_ND.clone().requires_grad_(), RMSNorm(96, 1e-6)
        norm.compute_dtype = dtype
        if plain:
            y = functional.rms_norm(x, (96,), norm.weight, 1e-6)
            out = functional.silu(y) * y
        else:
            y = norm(x)
            out = gated(y, y).float()
        return [out.detach(), *torch.autograd.grad(out, (x, norm.weight), upstream_ND)]

    pairs = [*zip(run(False), run(True), strict=True)]
    above_BO, x_BN = torch.randn(2, 200, 96, generator=generator).to(dtype)
    if cpu.serves_weights(above_BO, x_BN):
        pairs.append((cpu.weight_slopes(above_BO, x_BN), above_BO.float().T @ x_BN.float()))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def largest_difference(
    heads: int, groups: int, size: int, window: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Of values and gradients on two small rows, between the kernel and the masked reference in float32."""
    generator = torch.Generator().manual_seed(1)
    document_BT = (torch.rand(2, 256, generator=generator) < 0.02).long().cumsum(1)
    edges = [0] + [i + 1 for i in range(511) if i == 255 or document_BT.flatten()[i] != document_BT.flatten()[i + 1]]
    edge_S = torch.tensor([*edges, 512, 512], dtype=torch.int32, device=device)
    made = [torch.randn(2, 256, count, size, generator=generator) for count in (heads, groups, groups, heads)]
    *given, upstream = (x.to(device, dtype) for x in made)

    def run(kind: torch.dtype, kernel: bool) -> list[torch.Tensor]:
        q, k, v = (x.to(kind).requires_grad_() for x in given)
        if kernel:
            out = varlen_attention(q, k, v, edge_S, 256, window)
        else:
            mask = document_mask(document_BT.to(device), window)
            out = plain_attention(q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream.to(kind))]

    pairs = zip(run(dtype, True), run(torch.float32, False), strict=True)
    return max(float((one.float() - other).abs().max() / other.abs().max()) for one, other in pairs)
