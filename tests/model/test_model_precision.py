"""bf16 matmuls over float32 parameters, and starting weights that depend on one seed only."""

from __future__ import annotations

import math

import pytest
import torch

from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.norm import RMSNorm
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer

IDS_BT = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(4))


def gradients(model):
    model.zero_grad(set_to_none=True)
    target_N = IDS_BT.roll(-1, 1).flatten()
    model(IDS_BT, score=CrossEntropy(target_N, torch.ones(len(target_N)))).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_bfloat16_keeps_float32_parameters_and_gradients(make_model, tie_word_embeddings):
    model = make_model(tie_word_embeddings=tie_word_embeddings)
    exact = gradients(model)
    exact_logits = model(IDS_BT)
    set_compute_dtype(model, torch.bfloat16)
    rough = gradients(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {grad.dtype for grad in rough.values()} == {torch.float32}
    for name, grad in rough.items():
        assert 0 < (grad - exact[name]).norm() < 0.15 * exact[name].norm(), name
    assert model(IDS_BT).dtype == torch.float32
    assert not torch.equal(model(IDS_BT), exact_logits)
    assert model.blocks[0].mlp.gate_proj(torch.randn(2, 24)).dtype == torch.bfloat16
    set_compute_dtype(model, None)
    assert torch.equal(model(IDS_BT), exact_logits)


def test_norm_takes_its_statistics_in_float32():
    norm = RMSNorm(8, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(3, 8) * 100
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)
    rough = norm(x.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert torch.equal(rough, norm(x.bfloat16().float()).bfloat16()), "rounded once, at the end"


def test_initialise_depends_on_the_seed_alone(make_model):
    config = make_model().config
    torch.manual_seed(1)
    first = Transformer(config)
    before = torch.get_rng_state()
    initialise(first, 5)
    assert torch.equal(before, torch.get_rng_state()), "the global random state was used"
    torch.manual_seed(2)
    second = Transformer(config)
    initialise(second, 5)
    other = Transformer(config)
    initialise(other, 6)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
        drawn = value.ndim > 1 and not name.endswith(("o_proj.weight", "down_proj.weight"))
        assert not drawn or not torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize(("width", "wide"), [(128, 0.5 / math.sqrt(128)), (1024, 0.02)])
def test_initial_spreads(make_model, width, wide):
    model = make_model(hidden_size=width, vocab_size=500, intermediate_size=256, head_dim=32, num_hidden_layers=3)
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert bool((parameter == 1).all()), name
            continue
        spread = 0.02 if name == "embed.weight" else wide
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not parameter.any(), name
            continue
        assert abs(parameter.mean().item()) < 0.05 * spread, name
        assert parameter.std().item() == pytest.approx(spread, rel=0.03), name


def test_keys_begin_as_the_queries_they_serve(make_model):
    model = make_model(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    initialise(model, 0)
    attention = model.blocks[1].attention
    query, key = attention.q_proj.weight, attention.k_proj.weight
    assert torch.equal(key[:8], query[:8])
    assert torch.equal(key[8:], query[16:24])
