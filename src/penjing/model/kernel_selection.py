"""Tries a model's kernels before a run uses them (kernels/self_check.py)."""

from __future__ import annotations

import torch

from penjing.kernels import self_check
from penjing.model.config import ModelConfig
from penjing.model.rope import rotary_table
from penjing.model.transformer import Transformer


def activate_flash(model: Transformer, device: torch.device, dtype: torch.dtype) -> str:
    """`self_check.activate_flash` for the model's heads and windows."""
    windows = {model.config.window(layer) for layer in range(model.config.num_hidden_layers)}
    return self_check.activate_flash(_heads(model.config), windows, device, dtype)


def check_kernels(model: Transformer, device: torch.device, dtype: torch.dtype) -> str:
    """`self_check.check_kernels` for the model's heads, rotary table and vocabulary."""
    rotary = rotary_table(torch.arange(self_check.TRIED_TOKENS, device=device)[None], model.config)
    return self_check.check_kernels(_heads(model.config), rotary, model.config.vocab_size, device, dtype)


def _heads(config: ModelConfig) -> self_check.Heads:
    epsilon = config.rms_norm_eps if config.normalises_heads else None
    return self_check.Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, epsilon)
