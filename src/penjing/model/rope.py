"""Rotary position embedding (arXiv:2104.09864), in the rotate-half layout of `transformers` and llama.cpp.

Longer sequences than a model was trained with fit in by turning its slow dimensions slower: `linear` divides every
frequency by the factor (arXiv:2306.15595), `llama3` and `yarn` (arXiv:2309.00071) leave the fast ones alone and part
the rest each in its own way; yarn also sharpens attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.chunking import row_pieces
from penjing.model.config import ModelConfig


def frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each turned pair of dimensions, [rotary_size / 2] in float32."""
    size = config.rotary_size
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = 1.0 / config.rope_theta**exponent
    if config.rope_scaling == "linear":
        return plain / config.rope_factor
    if config.rope_scaling == "llama3":
        return _llama3(config, plain)
    if config.rope_scaling == "yarn":
        kept = _yarn_kept(config, size, plain.device)
        return plain / config.rope_factor * (1 - kept) + plain * kept
    return plain


def _llama3(config: ModelConfig, plain: Tensor) -> Tensor:
    """Above the high border as they were, below the low one divided by the factor, on a line between.

    In the order of operations of `transformers`: at position 100,000 the last bit of a frequency is seen in the logits.
    """
    length, low, high = config.rope_original_tokens, config.rope_low_frequency, config.rope_high_frequency
    wave = 2 * math.pi / plain
    share = (length / wave - low) / (high - low)
    between = (1 - share) * plain / config.rope_factor + share * plain
    slow = torch.where(wave > length / low, plain / config.rope_factor, plain)
    return torch.where((wave >= length / high) & (wave <= length / low), between, slow)


def _yarn_kept(config: ModelConfig, size: int, device: torch.device) -> Tensor:
    """How much of each frequency stays as it was, 1 for the fast ones to 0 for the slow ones, by dimension."""

    def dimension(turns: float) -> float:
        """Where a pair turns so many times within the original length."""
        return size * math.log(config.rope_original_tokens / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(config.rope_beta_fast)), 0)
    high = min(math.ceil(dimension(config.rope_beta_slow)), size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32, device=device) - low) / (max(high - low, 0) or 0.001)
    return 1 - ramp.clamp(0, 1)


def attention_factor(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by; their product scales the attention scores by its square."""
    if config.rope_scaling != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(max(config.rope_factor, 1.0)) + 1.0


def rotary_table(position_BT: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [B or 1, T, 1, rotary_size / 2] in float32."""
    angle = position_BT[..., None, None].float() * frequencies(config, position_BT.device)
    factor = attention_factor(config)
    return angle.cos() * factor, angle.sin() * factor


def rotate(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (i, i + n) of the first 2n dimensions by its position's angle, in float32; returns x's dtype."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Turned.apply(x_BTHK, cosine, sine)  # type: ignore[no-any-return,no-untyped-call]
    return _turn(x_BTHK, cosine, sine)


def _turn(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    size = 2 * cosine.shape[-1]
    if not arena.by_hand(x_BTHK):
        out = _turned(x_BTHK[..., :size].float(), torch.cat((cosine, cosine), dim=-1), sine).to(x_BTHK.dtype)
        return torch.cat((out, x_BTHK[..., size:]), dim=-1) if size < x_BTHK.shape[-1] else out
    out_BTHK = arena.empty_like(x_BTHK)
    cosine, sine = (each.expand(*x_BTHK.shape[:2], -1, -1).flatten(0, 1) for each in (cosine, sine))
    parts = row_pieces(out_BTHK.flatten(0, 1), x_BTHK.flatten(0, 1), torch.cat((cosine, cosine), dim=-1), sine)
    for out_CHK, x_CHK, cosine_C1R, sine_C1P in parts:
        wide = arena.cast(x_CHK[..., :size], torch.float32)
        out_CHK[..., :size] = _turned(wide, cosine_C1R, sine_C1P, arena.empty_like(wide))
        out_CHK[..., size:] = x_CHK[..., size:]
    return out_BTHK


def _turned(wide: Tensor, cosine: Tensor, sine: Tensor, out: Tensor | None = None) -> Tensor:
    """cosine: for both halves of the dimensions; sine: for one. Written to `out` if it is given."""
    num_pairs = sine.shape[-1]
    out = wide * cosine if out is None else torch.mul(wide, cosine, out=out)
    out[..., :num_pairs].addcmul_(wide[..., num_pairs:], sine, value=-1)
    out[..., num_pairs:].addcmul_(wide[..., :num_pairs], sine)
    return out


class _Turned(torch.autograd.Function):
    """The same, its gradient being the turn back: a third of the operations that autograd would record."""

    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x_BTHK, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _turn(upstream[0], cosine, -sine), None, None
