"""Logits and gradients equal stock `transformers`, with our weights there and with theirs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as functional

from penjing.convert.hf_config import hf_config
from penjing.convert.names import hf_name, to_hf
from penjing.model.score import CrossEntropy

transformers = pytest.importorskip("transformers")

TOKENIZER = SimpleNamespace(end_of_text=0, message_end=2)
# Id 0 is left out: it is the padding id, and transformers gives its embedding no gradient.
IDS_BT = torch.randint(1, 61, (3, 29), generator=torch.Generator().manual_seed(1))
SHAPES = [  # query heads, key/value heads, head width: D is 24, so heads x width is under, at and over it
    (4, 2, 8, True),
    (4, 4, 6, False),
    (6, 1, 4, True),
    (6, 3, 10, False),
    (1, 1, 8, True),
]


def stock(config):
    settings = hf_config(config, TOKENIZER)
    kind = settings.pop("architectures")[0]
    settings_class = {"Qwen3ForCausalLM": transformers.Qwen3Config, "LlamaForCausalLM": transformers.LlamaConfig}[kind]
    return getattr(transformers, kind)(settings_class(**settings)).float().eval()


def load(theirs, weights):
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()


@pytest.fixture(params=["qwen3", "llama"])
def architecture(request):
    return request.param


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "tie_word_embeddings"), SHAPES)
def test_logits_with_our_weights_there(make_model, architecture, heads, kv_heads, head_dim, tie_word_embeddings):
    model = make_model(
        architecture=architecture,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tie_word_embeddings,
    )
    theirs = stock(model.config)
    load(theirs, to_hf(model.state_dict(), model.config))
    with torch.no_grad():
        difference = (theirs(IDS_BT).logits - model(IDS_BT)).abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "tie_word_embeddings"), SHAPES)
def test_logits_with_their_weights_here(make_model, architecture, heads, kv_heads, head_dim, tie_word_embeddings):
    model = make_model(
        architecture=architecture,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tie_word_embeddings,
    )
    torch.manual_seed(7)
    theirs = stock(model.config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    known = theirs.state_dict()
    model.load_state_dict({name: known[hf_name(name)] for name in model.state_dict()})
    with torch.no_grad():
        difference = (theirs(IDS_BT).logits - model(IDS_BT)).abs().max()
    assert difference < 1e-5


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_gradients_of_the_next_token_loss(make_model, architecture, tie_word_embeddings):
    model = make_model(architecture=architecture, tie_word_embeddings=tie_word_embeddings)
    theirs = stock(model.config)
    load(theirs, to_hf(model.state_dict(), model.config))
    theirs(IDS_BT, labels=IDS_BT).loss.backward()
    target_N = IDS_BT[:, 1:].flatten()
    place_BT = torch.arange(IDS_BT.numel()).view_as(IDS_BT)[:, :-1]
    total = model(IDS_BT, scored_N=place_BT.flatten(), score=CrossEntropy(target_N, torch.ones(len(target_N))))
    (total / len(target_N)).backward()
    their_parameters = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        expected = their_parameters[hf_name(name)].grad
        assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm(), name


def test_names_cover_all_of_theirs(make_model, architecture):
    model = make_model(architecture=architecture, tie_word_embeddings=False)
    assert set(to_hf(model.state_dict(), model.config)) == set(stock(model.config).state_dict())


def test_the_plain_loss_is_cross_entropy_of_the_logits(make_model):
    model = make_model()
    target_BT = IDS_BT.roll(-1, 1)
    total = model(IDS_BT, score=CrossEntropy(target_BT.flatten(), torch.ones(target_BT.numel())))
    expected = functional.cross_entropy(model(IDS_BT).flatten(0, 1), target_BT.flatten(), reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
