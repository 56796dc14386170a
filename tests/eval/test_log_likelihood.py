"""Packed rows with shared beginnings against one text at a time."""

import math
import random

import pytest
import torch
from small_models import small_model

from penjing.eval.log_likelihood import Ending, log_likelihoods
from penjing.infer.requests import NotFiniteError

VOCABULARY, CONTEXT = 40, 300


def one_at_a_time(model, ending):
    with torch.no_grad():
        logits_TV = model(torch.tensor([ending.ids[:-1]]))[0][ending.first - 1 :].double()
    targets = torch.tensor(ending.ids[ending.first :])
    logp = logits_TV.log_softmax(-1).gather(1, targets[:, None]).sum()
    return float(logp), bool((logits_TV.argmax(-1) == targets).all())


def texts(draw):
    """Of many lengths; some share a beginning, an input, or all."""
    stems = [[0] + [draw.randrange(1, VOCABULARY) for _ in range(length)] for length in (0, 3, 20, 60, 150)]
    for _ in range(120):
        stem = draw.choice(stems)
        ids = stem + [draw.randrange(1, VOCABULARY) for _ in range(draw.choice([1, 1, 2, 5, 40]))]
        yield Ending(ids, draw.choice([1, len(stem), len(ids) - 1, len(ids)]) or 1)
        if draw.random() < 0.3:
            yield Ending([*ids[:-1], draw.randrange(1, VOCABULARY)], len(ids) - 1)
        if draw.random() < 0.2:
            yield Ending([*ids, 1], len(ids))


@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.parametrize("window", [0, 24])
def test_every_ending_as_by_itself(batch_size, window):
    layers = dict(sliding_window=window, sliding_window_layers=(0,)) if window else {}
    model = small_model(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, sharpen=3, **layers)
    endings = list(texts(random.Random(3)))
    found = log_likelihoods(model, endings, batch_size)
    num_greedy = 0
    for ending, score in zip(endings, found, strict=True):
        logp, is_greedy = one_at_a_time(model, ending)
        assert score.logp == pytest.approx(logp, abs=2e-4)
        assert score.greedy == is_greedy
        assert score.num_tokens == len(ending.ids) - ending.first
        num_greedy += is_greedy and score.num_tokens > 0
    assert 0 < num_greedy < len(endings)


def test_equal_logits_share_the_first_place():
    model = small_model(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    with torch.no_grad():
        model.embed.weight.zero_()
    one, two = log_likelihoods(model, [Ending([0, 5], 1), Ending([0, 7, 9], 1)])
    assert one.greedy == pytest.approx(1 / VOCABULARY) and two.greedy == pytest.approx(1 / VOCABULARY**2)
    assert one.logp == pytest.approx(-math.log(VOCABULARY), rel=1e-12)


def test_nan_is_an_error():
    model = small_model(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    with torch.no_grad():
        model.embed.weight[5] = math.nan
    with pytest.raises(NotFiniteError):
        log_likelihoods(model, [Ending([0, 5, 3], 1)])


def test_the_model_stays_in_training():
    model = small_model(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT).train()
    log_likelihoods(model, [Ending([0, 5, 3], 1)])
    assert model.training and log_likelihoods(model, []) == []
