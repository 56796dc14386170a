"""Exact parameter counts: the closed form, the built model and the published figures agree."""

from __future__ import annotations

import pytest
import torch
from user_errors import raises_user_error

from penjing.model.config import ModelConfig
from penjing.model.presets import PRESETS
from penjing.model.transformer import Transformer
from penjing.plan.flops import parameters

PUBLISHED = {
    "27m": 26_878_464,
    "26m": 25_829_888,
    "64m": 63_912_192,
    "104m": 104_030_976,
    "145m-moe": 145_029_760,
    "198m-moe": 198_416_640,
    "gpt2-124m": 123_551_232,
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "tinyllama-1.1b": 1_100_048_384,
    "llama3.2-1b": 1_235_814_400,
}
VARIANTS: list[dict[str, object]] = [
    {"architecture": "qwen3"},
    {"architecture": "llama"},
    {"architecture": "qwen2"},
    {"architecture": "qwen2", "attention_bias": "none"},
    {
        "architecture": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": (1,),
    },
    {"architecture": "mixtral", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    {
        "architecture": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 56,
    },
    {
        "architecture": "glm4_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": (0,),
    },
]


def built(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_the_closed_form_counts_the_built_model(variant, tie_word_embeddings):
    config = ModelConfig(**{**ModelConfig.named("tiny"), **variant, "tie_word_embeddings": tie_word_embeddings})
    model = built(config)
    count = parameters(config)
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
    assert count.embedding == model.embed.weight.numel()
    assert count.without_embedding == count.total - model.embed.weight.numel()
    routed = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    used = routed * config.num_experts_per_tok // max(1, config.num_experts)
    assert count.active == count.total - routed + used
    in_matmuls = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.weight")
    assert count.matrices == in_matmuls + used + (count.embedding if tie_word_embeddings else 0)


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_presets_have_their_published_size(name, total):
    config = ModelConfig(**ModelConfig.named(name))
    assert parameters(config).total == total
    assert sum(parameter.numel() for parameter in built(config).parameters()) == total


def test_the_mixtures_use_as_much_as_published():
    assert parameters(ModelConfig(**ModelConfig.named("198m-moe"))).active == 63_936_768
    assert parameters(ModelConfig(**ModelConfig.named("tiny-moe"))).active < 1_200_000


def test_every_preset_is_listed_with_its_name():
    assert set(PUBLISHED) | {"tiny", "tiny-moe"} == set(PRESETS)
    assert ModelConfig(**ModelConfig.named("tiny")).preset == "tiny"


@pytest.mark.parametrize("size", [6e5, 1e6, 2.5e6, 5e6, 7e6, 1.7e7, 4.5e7, 9e7, 2.2e8, 5e8, 1e9, 3e9])
def test_a_rung_of_the_ladder_is_near_the_size_asked_for(size):
    config = ModelConfig(**ModelConfig.named(f"ladder-{size / 1e6:g}m"))
    assert abs(parameters(config).total / size - 1) < 0.08
    assert config.num_attention_heads * config.head_dim == config.hidden_size
    assert 1 <= config.num_attention_heads // config.num_key_value_heads <= 4


def test_no_such_rung():
    with raises_user_error(where="model.preset", got="'30'"):
        ModelConfig.named("ladder-30")
