"""A vocabulary grows without disturbing what is known, and never shrinks."""

from __future__ import annotations

import pytest
import torch
from user_errors import raises_user_error

from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.resize_embeddings import resize_embeddings
from penjing.model.transformer import Transformer

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_new_rows_are_the_mean_and_old_ones_stay(tie_word_embeddings):
    model = Transformer(ModelConfig(**SHAPE, vocab_size=11, tie_word_embeddings=tie_word_embeddings))
    initialise(model, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grown = resize_embeddings(model.state_dict(), 14)
    bigger = Transformer(ModelConfig(**SHAPE, vocab_size=14, tie_word_embeddings=tie_word_embeddings))
    bigger.load_state_dict(grown)
    for name, value in before.items():
        assert torch.equal(grown[name][: len(value)], value)
        assert torch.equal(model.state_dict()[name], value)
        for row in grown[name][len(value) :]:
            assert torch.allclose(row, value.mean(0), atol=1e-7)
    ids_BT = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        old_BTV, new_BTV = model(ids_BT), bigger(ids_BT)
    assert torch.allclose(new_BTV[..., :11], old_BTV, atol=1e-6)
    assert torch.allclose(new_BTV[..., 11:], old_BTV.mean(-1, keepdim=True), atol=1e-6)
    assert resize_embeddings(before, 11).keys() == before.keys()


def test_it_never_shrinks():
    state = Transformer(ModelConfig(**SHAPE, vocab_size=11)).state_dict()
    with raises_user_error(where="model.vocab_size", got=10):
        resize_embeddings(state, 10)
