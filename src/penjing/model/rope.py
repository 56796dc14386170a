"""Rotary position embedding (arXiv:2104.09864, equation 15), in the rotate-half layout of `transformers` and llama.cpp.

At position p the pair of dimensions (i, i + n) of queries and keys is rotated by the angle p * theta^(-i / n)
(`ops.apply_rope`). RoPE scaling lowers frequencies for sequences longer than those in training: `linear` divides every
frequency by the factor (arXiv:2306.15595); `llama3` and `yarn` (arXiv:2309.00071) keep high frequencies, divide low
ones, and interpolate between, each by its own formula; yarn also scales the attention scores.
"""

import math

import torch
from torch import Tensor

from penjing.devices import HOST
from penjing.model.config import ModelConfig


def frequencies(config: ModelConfig, device: torch.device = HOST) -> Tensor:
    """Angle per position of each rotated pair of dimensions, [rotary_size / 2] in float32."""
    size = config.rotary_size
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    base = 1.0 / config.rope_theta**exponent
    if config.rope_scaling == "linear":
        return base / config.rope_factor
    if config.rope_scaling == "llama3":
        return _llama3(config, base)
    if config.rope_scaling == "yarn":
        unscaled = _yarn_unscaled_fraction(config, size, base.device)
        return base / config.rope_factor * (1 - unscaled) + base * unscaled
    return base


def _llama3(config: ModelConfig, base: Tensor) -> Tensor:
    """High frequencies are unchanged, low ones divided by the factor, those between interpolated. The order of
    operations is that of `transformers`: at position 100,000 a frequency's last bit changes the logits."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    length = config.rope_original_max_position_embeddings
    wavelength = 2 * math.pi / base
    smooth = (length / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * base / config.rope_factor + smooth * base
    scaled = torch.where(wavelength > length / low, base / config.rope_factor, base)
    return torch.where((wavelength >= length / high) & (wavelength <= length / low), smoothed, scaled)


def _yarn_unscaled_fraction(config: ModelConfig, size: int, device: torch.device) -> Tensor:
    """The unscaled fraction of each frequency, from 1 for high ones to 0 for low ones."""

    def dimension(rotations: float) -> float:
        """The pair that makes this many rotations within the original length."""
        length = config.rope_original_max_position_embeddings
        return size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(config.rope_beta_fast)), 0)
    high = min(math.ceil(dimension(config.rope_beta_slow)), size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32, device=device) - low) / (max(high - low, 0) or 0.001)
    return 1 - ramp.clamp(0, 1)


def attention_factor(config: ModelConfig) -> float:
    """The factor of cosines and sines; it scales attention scores by its square."""
    if config.rope_scaling != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(max(config.rope_factor, 1.0)) + 1.0


def rotary_table(position_BT: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [B or 1, T, 1, rotary_size / 2] in float32."""
    angle = position_BT[..., None, None].float() * frequencies(config, position_BT.device)
    factor = attention_factor(config)
    return angle.cos() * factor, angle.sin() * factor
