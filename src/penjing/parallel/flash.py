"""FlashAttention 4 or 3 behind torch's attention where it is installed and computes what it should on this card."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from penjing.model.attention import document_mask, plain_attention
from penjing.model.documents import has_varlen, varlen_attention

NEWEST_FIRST = ("FA4", "FA3")
LARGEST_DIFFERENCE = 0.05  # in bfloat16, of values and gradients of size 1


def activate_flash(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """Activate the newest that works for the model's heads; its name, or "" where torch's own (2) stays.

    Hopper and later only. An implementation that is there but gives wrong values or gradients, or none for this width
    of a head, is put back with a warning: early versions lacked windows and the backward pass of narrow heads.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    config = getattr(model, "config", None)
    if config is None or activate is None or device.type != "cuda" or not has_varlen(device, dtype, config.head_size):
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
