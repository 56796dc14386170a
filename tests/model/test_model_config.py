"""Shapes that cannot work are refused with a line that names the setting."""

from __future__ import annotations

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "rope_theta",
        "rms_norm_eps",
    ],
)
@pytest.mark.parametrize("value", [0, -2])
def test_sizes_must_be_positive(name, value):
    with raises_user_error(where=f"model.{name}", got=value):
        ModelConfig(**{name: value})


def test_query_heads_must_share_key_heads_evenly():
    with raises_user_error(where="model.num_attention_heads", got="6 over 4"):
        ModelConfig(num_attention_heads=6, num_key_value_heads=4)


def test_rotary_positions_need_pairs():
    with raises_user_error(where="model.head_dim", got=5):
        ModelConfig(head_dim=5)


MIXTURE = {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"num_experts": 4},
            "model.num_experts: qwen3 is a dense architecture; got 4. Set model.architecture=qwen3_moe",
        ),
        ({"architecture": "qwen3_moe"}, "model.num_experts: qwen3_moe is a mixture of experts; got 0"),
        (
            {**MIXTURE, "num_experts_per_tok": 5},
            "model.num_experts_per_tok: more than there are; got 5; wanted at most",
        ),
        ({**MIXTURE, "shared_expert_intermediate_size": 32}, "Set model.architecture=glm4_moe"),
        (
            {**MIXTURE, "architecture": "glm4_moe", "shared_expert_intermediate_size": 33},
            "a multiple of model.moe_intermediate_size = 32",
        ),
        ({**MIXTURE, "architecture": "glm4_moe", "mlp_only_layers": (1,)}, "the dense layers are the first ones"),
        ({**MIXTURE, "architecture": "glm4_moe", "num_experts": 1, "num_experts_per_tok": 1}, "wanted at least 2"),
        ({**MIXTURE, "mlp_only_layers": (8,)}, "model.mlp_only_layers: no such layer; got 8; wanted 0..7"),
        ({**MIXTURE, "routed_scaling_factor": 2.0}, "has no such factor"),
        ({"architecture": "llama", "num_attention_heads": 6}, "model.hidden_size: the stock llama class wants"),
        ({"rope_factor": 2.0}, "Set model.rope_scaling=yarn"),
        ({"rope_scaling": "yarn", "rope_factor": 2.0}, "model.rope_original_max_position_embeddings"),
        (
            {"rope_scaling": "yarn", "rope_original_max_position_embeddings": 8, "rope_beta_slow": 0.0},
            "model.rope_beta_slow: out of range",
        ),
        (
            {"rope_scaling": "llama3", "rope_original_max_position_embeddings": 8, "rope_high_freq_factor": 1.0},
            "model.rope_high_freq_factor: must exceed the low factor; got 1.0",
        ),
        ({"rope_attention_factor": -1.0}, "model.rope_attention_factor: out of range"),
        (
            {
                "architecture": "glm4_moe",
                "num_experts": 4,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 8,
                "shared_expert_intermediate_size": -8,
            },
            "model.shared_expert_intermediate_size: out of range",
        ),
        ({"partial_rotary_factor": 0.3}, "model.partial_rotary_factor"),
        ({"sliding_window_layers": (1,)}, "has no effect without model.sliding_window"),
        ({"architecture": "llama", "sliding_window": 8}, "the stock llama class has no sliding window"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(settings, expected):
    with pytest.raises(UserError) as caught:
        ModelConfig(**settings)
    assert "\n" not in str(caught.value)
    assert expected in str(caught.value)


def test_an_unknown_preset_names_the_nearest():
    with raises_user_error(where="model.preset", next_step="26m"):
        ModelConfig.named("26M")
