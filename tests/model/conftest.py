"""Small models for the tests of this floor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.transformer import Transformer


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    """A model of two layers whose attention is far from even: fresh weights, four times as wide."""

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
        for parameter in model.parameters():
            parameter.data *= 4 if parameter.ndim > 1 else 1
        return model

    return make
