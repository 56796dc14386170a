"""Log-likelihoods against a plain computation; ties, chance and standard errors."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.data.tokenizer.train import train_tokenizer
from penjing.eval.scorer import Graded, grade, standard_error
from penjing.eval.task import LogLikelihood, Result, Task, best

WORDS = ["The cat sat on the mat, and a frog sang.", "猫坐在垫子上，青蛙唱歌。"] * 20
ASKED = [
    LogLikelihood(text="The cat", choices=(" sat", " sang on the mat", "s"), answer=0),
    LogLikelihood(text="", choices=("A frog", "猫"), answer=1),
    LogLikelihood(text="猫坐在", choices=("垫子上", "The mat, and a frog sang."), answer=0, kind="place"),
    LogLikelihood(text="A frog ", choices=("sang", "sat", "mat", "frog"), answer=3, kind="place"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(WORDS, 300)


def model_of(tokenizer, **how):
    return small_model(vocab_size=tokenizer.size, max_position_embeddings=48, **how)


def by_hand(model, tokenizer, text, choice):
    """The sum over the tokens that text alone does not have, each with its own forward pass, in float64."""
    before, ids = tokenizer.encode(text), tokenizer.encode(text + choice)
    same = 0
    while same < len(before) and before[same] == ids[same]:
        same += 1
    total = 0.0
    for end in range(same, len(ids)):
        with torch.no_grad():
            logits_V = model(torch.tensor([[tokenizer.begin, *ids[:end]]]))[0, -1].double()
        total += float(logits_V.log_softmax(-1)[ids[end]])
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_log_likelihoods_against_one_token_at_a_time(tokenizer, batch_size):
    model = model_of(tokenizer, sharpen=2)
    for one in grade(Task(), ASKED, model, tokenizer, batch_size=batch_size):
        wanted = [by_hand(model, tokenizer, one.request.text, choice) for choice in one.request.choices]
        assert one.result.logps == pytest.approx(wanted, abs=1e-4)
        assert one.text == one.request.choices[wanted.index(max(wanted))]
        assert one.score == (one.text == one.request.wanted)


def test_a_uniform_model_scores_chance(tokenizer):
    """Choices of as many tokens tie: each counts 1/k, wherever the right one stands."""
    model = model_of(tokenizer)
    with torch.no_grad():
        model.embed.weight.zero_()
    places = [("xyz"[:size], answer) for size in (2, 3) for answer in range(size)]
    asked = [LogLikelihood(text="a", choices=tuple(choices), answer=answer) for choices, answer in places]
    graded = grade(Task(), asked, model, tokenizer)
    assert [one.score for one in graded] == [one.request.chance for one in graded]
    assert [sum(best(one.result.logps)) for one in graded] == [2, 2, 3, 3, 3]
    assert all(
        logp == pytest.approx(-math.log(tokenizer.size), rel=1e-12) for one in graded for logp in one.result.logps
    )


def test_the_softmax_is_in_float64(tokenizer):
    """Probabilities that float32 cannot tell apart differ."""
    model = model_of(tokenizer)
    with torch.no_grad():
        model.embed.weight.zero_()
    [one] = grade(Task(), ASKED[:1], model, tokenizer)
    assert one.result.logps[0] != float(torch.tensor(one.result.logps[0]).float())


def test_standard_error_by_hand():
    graded = [Graded(None, Result(text=""), score) for score in (1, 0, 0.5, 1)]
    mean = 2.5 / 4
    variance = sum((score - mean) ** 2 for score in (1, 0, 0.5, 1)) / 3
    assert standard_error(graded) == pytest.approx(math.sqrt(variance / 4))
    assert standard_error(graded[:1]) is None


def test_a_text_longer_than_the_context_loses_its_beginning(tokenizer):
    model = model_of(tokenizer, sharpen=2)
    text, choices = "猫坐在垫子上，" * 20, ("青蛙唱歌。", "x")
    [one] = grade(Task(), [LogLikelihood(text=text, choices=choices, answer=0)], model, tokenizer)
    assert one.result.is_truncated
    for logp, choice in zip(one.result.logps, choices, strict=True):
        ids = tokenizer.encode(text + choice)[-49:]
        chosen = len(tokenizer.encode(text + choice)) - len(tokenizer.encode(text))
        with torch.no_grad():
            logp_TV = model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        wanted = sum(float(logp_TV[place - 1, ids[place]]) for place in range(49 - chosen, 49))
        assert logp == pytest.approx(wanted, abs=1e-4)


def test_a_choice_that_fills_the_context_is_named(tokenizer):
    ids = len(tokenizer.encode("猫" * 80))
    long = LogLikelihood(text="x", choices=("猫" * 80, "y"), answer=0, where="file:3")
    with raises_user_error(where="file:3", got=f"{ids} tokens"):
        grade(Task(), [long], model_of(tokenizer), tokenizer)


def test_nothing_asked_is_nothing_graded(tokenizer):
    assert grade(Task(), [], model_of(tokenizer), tokenizer) == []
