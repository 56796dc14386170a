"""Rotary position embedding (arXiv:2104.09864, equation 15), in the rotate-half layout of `transformers` and llama.cpp.

At position p the pair of dimensions (i, i + n) of queries and keys is rotated by the angle p * theta^(-i / n)
(`ops.apply_rope`). Longer sequences than a model was trained with fit in by rotating its slow dimensions slower:
`linear` divides every frequency by the factor (arXiv:2306.15595), `llama3` and `yarn` (arXiv:2309.00071) leave the fast
ones alone and part the rest each in its own way; yarn also sharpens attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penjing.model.config import ModelConfig


def frequencies(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each rotated pair of dimensions, [rotary_size / 2] in float32."""
    size = config.rotary_size
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    plain = 1.0 / config.rope_theta**exponent
    if config.rope_scaling == "linear":
        return plain / config.rope_factor
    if config.rope_scaling == "llama3":
        return _llama3(config, plain)
    if config.rope_scaling == "yarn":
        kept = _yarn_unscaled_fraction(config, size, plain.device)
        return plain / config.rope_factor * (1 - kept) + plain * kept
    return plain


def _llama3(config: ModelConfig, plain: Tensor) -> Tensor:
    """Above the high border as they were, below the low one divided by the factor, on a line between.

    In the order of operations of `transformers`: at position 100,000 the last bit of a frequency is seen in the logits.
    """
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    length = config.rope_original_max_position_embeddings
    wave = 2 * math.pi / plain
    share = (length / wave - low) / (high - low)
    between = (1 - share) * plain / config.rope_factor + share * plain
    slow = torch.where(wave > length / low, plain / config.rope_factor, plain)
    return torch.where((wave >= length / high) & (wave <= length / low), between, slow)


def _yarn_unscaled_fraction(config: ModelConfig, size: int, device: torch.device) -> Tensor:
    """How much of each frequency stays as it was, 1 for the fast ones to 0 for the slow ones, by dimension."""

    def dimension(rotations: float) -> float:
        """Where a pair rotates so many times within the original length."""
        length = config.rope_original_max_position_embeddings
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

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
