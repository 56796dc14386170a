"""Small models for the tests of this floor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penjing.kernels.cpu import library
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    """A model of two layers whose attention is far from even: weights four times as wide, outputs drawn too."""

    def make(seed: int = 0, **settings: object) -> Transformer:
        shape = {
            "vocabulary_size": 61,
            "hidden_size": 24,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_size": 8,
            "mlp_size": 40,
            "max_tokens": 64,
            "rope_theta": 1e4,
        }
        model = Transformer(ModelConfig(**{**shape, **settings}))
        initialise(model, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # they begin at zero, where a block says nothing
                parameter.data.normal_(0, 0.05, generator=generator)
            parameter.data *= 4 if parameter.ndim > 1 else 1
        return model

    return make


@pytest.fixture
def without_cpu_kernels(monkeypatch) -> Callable[[], None]:
    """Switches kernels of our own on the CPU off for the rest of a test."""
    return lambda: monkeypatch.setattr(library, "kernels", lambda: None)
