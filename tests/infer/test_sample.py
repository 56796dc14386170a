"""Drawing the next token: the right set, the right shares, the same seed the same draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_models import rows_of
from user_errors import raises_user_error

from penjing.infer.requests import Request
from penjing.infer.sample import Sampling, sample_tokens
from penjing.infer.sampler import Sampler

CHANCE = torch.tensor([0.05, 0.4, 0.02, 0.3, 0.15, 0.08])
LOGITS_BV = CHANCE.log()[None] + 3.0
DRAWS = 20_000


def pick(logits_BV, sampling, seed=0):
    """The id of each row."""
    rows = len(logits_BV)
    uniform_B = np.random.default_rng(seed).random(rows, dtype=np.float32)
    return sample_tokens(logits_BV, uniform_B, rows_of([sampling] * rows)).id_R


def shares(sampling, seed=0):
    """How often each id is drawn."""
    id_B = pick(LOGITS_BV.expand(DRAWS, -1), sampling, seed)
    return torch.bincount(id_B, minlength=6) / DRAWS


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.92}, [1, 3, 4, 5]),
        ({"top_p": 0.99}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),  # 0.4 / 0.85 is under a half
        ({"top_k": 2, "top_p": 0.5}, [1]),  # 0.4 / 0.7 is over it
    ],
)
def test_the_kept_set_and_its_shares(options, kept):
    expected = torch.zeros(6)
    expected[kept] = CHANCE[kept] / CHANCE[kept].sum()
    found = shares(Sampling(temperature=1.0, **options))
    assert (found > 0).nonzero()[:, 0].tolist() == kept
    # four standard deviations of a share of 20,000 draws
    assert ((found - expected).abs() <= 4 * (expected * (1 - expected) / DRAWS).sqrt()).all()


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_divides_the_logits(temperature):
    expected = CHANCE ** (1 / temperature)
    expected /= expected.sum()
    assert ((shares(Sampling(temperature=temperature)) - expected).abs() < 0.015).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9])
def test_no_temperature_is_greedy(temperature):
    assert pick(LOGITS_BV * 1e6, Sampling(temperature=temperature, top_p=0.5)).tolist() == [1]


def test_rows_have_their_own_sets():
    logits_BV = torch.tensor([[9.0, 0, 0, 0], [0, 0, 9.0, 0]])
    for seed in range(20):
        drawn = pick(logits_BV, Sampling(temperature=1.0, top_p=0.9), seed)
        assert drawn.tolist() == [0, 2]


def test_a_seed_repeats_and_another_differs():
    sampling = Sampling(temperature=1.0)
    draws = [pick(LOGITS_BV.expand(50, -1), sampling, seed).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_bad_settings_are_refused(options, name):
    with raises_user_error(where=name):
        Sampling(**options)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.01),
    ],
)
def test_a_row_of_a_large_vocabulary_is_drawn_alone_as_among_others(sampling):
    """Also where torch has several threads: it would part the sums of a single row among them."""
    vocab_size, slots = 70_000, 3
    logits_RV = 3 * torch.randn(slots, vocab_size, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(slots, 4, vocab_size, logits_RV.device)
    for slot in range(slots):
        sampler.put(slot, Request(prompt=[1], sampling=sampling, top_logprobs=3), slot, 4, ())
    slot_R, at_R = np.arange(slots), np.zeros(slots, dtype=np.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = sampler.sample(slot_R, at_R, logits_RV, {})
        alone = [sampler.sample(slot_R[[row]], at_R[[row]], logits_RV[[row]], {}) for row in range(slots)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for row, one in enumerate(alone):
        assert [values[0] for values in one] == [values[row] for values in whole]
