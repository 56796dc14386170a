"""Rotary position embedding (arXiv:2104.09864), in the rotate-half layout of `transformers` and llama.cpp."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(position_BT: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [B or 1, T, 1, K/2] in float32: angle = position * theta^(-2i/K)."""
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=position_BT.device) / head_size
    angle = position_BT[..., None, None].float() * (1.0 / theta**exponent)
    return angle.cos(), angle.sin()


def rotate(x_BTHK: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (i, i + K/2) of every head by its position's angle, in float32; returns x's dtype."""
    first, second = x_BTHK.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x_BTHK.dtype)
