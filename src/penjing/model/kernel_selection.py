"""Tries a model's kernels before a run uses them (kernels/self_check.py)."""

from __future__ import annotations

import torch
from torch import nn

from penjing.kernels import self_check
from penjing.model.config import ModelConfig
from penjing.model.rope import rotary_table


def activate_flash(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """`self_check.activate_flash` for the model's heads and windows."""
    config = getattr(model, "config", None)
    if config is None:
        return ""
    windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
    return self_check.activate_flash(_heads(config), windows, device, dtype)


def check_kernels(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """`self_check.check_kernels` for the model's heads, rotary table and vocabulary."""
    config = getattr(model, "config", None)
    if config is None:
        return ""
    rotary = rotary_table(torch.arange(self_check.TRIED_TOKENS, device=device)[None], config)
    return self_check.check_kernels(_heads(config), rotary, config.vocab_size, device, dtype)


def _heads(config: ModelConfig) -> self_check.Heads:
    epsilon = config.rms_norm_eps if config.normalises_heads else None
    return self_check.Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, epsilon)
