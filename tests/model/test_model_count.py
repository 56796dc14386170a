"""Exact parameter counts: the closed form, the built model and the published figures agree."""

from __future__ import annotations

import pytest
import torch

from penjing.model.config import ModelConfig
from penjing.model.presets import PRESETS
from penjing.model.transformer import Transformer
from penjing.plan.flops import parameters

PUBLISHED = {"26m": 25_829_888, "64m": 63_912_192, "104m": 104_030_976}


def built(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("embeddings", ["tied", "untied"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_the_closed_form_counts_the_built_model(name, embeddings, architecture):
    config = ModelConfig(**{**ModelConfig.named(name), "embeddings": embeddings, "architecture": architecture})
    model = built(config)
    count = parameters(config)
    assert count.total == sum(parameter.numel() for parameter in model.parameters())
    assert count.embedding == model.embed.weight.numel()
    assert count.without_embedding == count.total - model.embed.weight.numel()
    in_products = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.weight")
    assert count.matrices == in_products + (count.embedding if embeddings == "tied" else 0)


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_presets_have_their_published_size(name, total):
    config = ModelConfig(**ModelConfig.named(name))
    assert parameters(config).total == total
    assert sum(parameter.numel() for parameter in built(config).parameters()) == total


def test_every_preset_is_listed_with_its_name():
    assert set(PUBLISHED) | {"tiny"} == set(PRESETS)
    assert ModelConfig(**ModelConfig.named("tiny")).preset == "tiny"
