"""Shapes that cannot work are refused with a line that names the setting."""

from __future__ import annotations

import pytest

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig


@pytest.mark.parametrize(
    "name",
    [
        "vocabulary_size",
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "mlp_size",
        "max_tokens",
        "rope_theta",
        "norm_epsilon",
    ],
)
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_must_be_positive(name, value):
    with pytest.raises(UserError, match=rf"model\.{name}: too small; got {value}"):
        ModelConfig(**{name: value})


def test_query_heads_must_share_key_heads_evenly():
    with pytest.raises(UserError, match=r"model\.num_heads.*got 6 over 4"):
        ModelConfig(num_heads=6, num_kv_heads=4)


def test_rotary_positions_need_pairs():
    with pytest.raises(UserError, match=r"model\.head_size.*got 5"):
        ModelConfig(head_size=5)


def test_experts_are_refused_with_what_to_do():
    with pytest.raises(UserError) as caught:
        ModelConfig(experts=4)
    line = str(caught.value)
    assert "\n" not in line
    assert "model.experts: mixture of experts is not in this version; got 4; wanted 0. Leave model.experts out" in line


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"no model preset is called '26M'.*26m"):
        ModelConfig.named("26M")
