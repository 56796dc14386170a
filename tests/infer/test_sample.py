"""Drawing the next token: the right set, the right shares, the same seed the same draw."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_models import rows_of
from user_errors import raises_user_error

from penjing.infer.requests import Request
from penjing.infer.sample import Rows, Sampling, sample_tokens, warp_logits
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


def kept_by_definition(logit_V, sampling):
    """The ids that a row samples from: first the k most likely with ties of the last, then of these as many as hold
    top_p; and none less likely than min_p times the first."""
    order = sorted(range(len(logit_V)), key=lambda index: -logit_V[index])
    if sampling.top_k:
        order = [index for index in order if logit_V[index] >= logit_V[order[min(sampling.top_k, len(order)) - 1]]]
    chance = {index: math.exp(logit_V[index] - logit_V[order[0]]) for index in order}
    kept, total, whole = [], 0.0, sum(chance.values())
    for index in order:
        if total / whole >= sampling.top_p or chance[index] < sampling.min_p:
            break
        kept.append(index)
        total += chance[index]
    return kept


@pytest.mark.parametrize("largest_top_k", [40, 700, 5000])  # of the batch: as many are sorted at first, at least 256
def test_filters_keep_what_they_are_defined_to_keep_of_a_large_vocabulary(largest_top_k):
    """Also beyond the tokens that are sorted at first, beside rows that need only a few."""
    styles = [
        {"top_p": 0.9},
        {},
        {"top_k": 700},
        {"top_p": 0.2},
        {"top_k": 700, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.5},
        {"top_p": 0.95, "min_p": 0.3},
        {"min_p": 0.05},
        {"top_k": 5000},
    ]
    styles = [style for style in styles if style.get("top_k", 0) <= largest_top_k]
    logits_RV = torch.randn(len(styles), 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits_RV *= torch.tensor([5.0 if style.get("top_p") == 0.2 else 0.5 for style in styles])[:, None]
    samplings = [Sampling(temperature=1.0, **style) for style in styles]
    warped_RV = warp_logits(logits_RV.float(), rows_of(samplings))
    sizes = set()
    for row, sampling in enumerate(samplings):
        wanted = kept_by_definition(logits_RV[row].tolist(), sampling)
        assert (warped_RV[row] > -math.inf).nonzero()[:, 0].tolist() == sorted(wanted), styles[row]
        sizes.add(len(wanted))
    assert max(sizes - {3000}) > 700 and min(sizes) < 40


def test_log_probabilities_of_greedy_filtered_and_plain_rows_side_by_side():
    """logp is of the whole softmax at the score temperature, sampling_logp of the distribution that was sampled."""
    styles = [(0.0, 1.0, 0), (0.7, 0.7, 0), (0.7, 0.7, 3), (1e-9, 0.7, 0), (1.0, 0.7, 0)]
    logits_RV = torch.randn(len(styles), 50, generator=torch.Generator().manual_seed(3))
    rows = Rows.empty(len(styles))
    for row, (temperature, score_temperature, top_k) in enumerate(styles):
        rows.put(row, Sampling(temperature=temperature, top_k=top_k), score_temperature)
    for seed in range(10):
        uniform_R = np.random.default_rng(seed).random(len(styles), dtype=np.float32)
        found = sample_tokens(logits_RV, uniform_R, rows)
        for row, (temperature, score_temperature, top_k) in enumerate(styles):
            logit_V, token = logits_RV[row].double(), int(found.id_R[row])
            whole_V = (logit_V / score_temperature).log_softmax(-1)
            assert float(found.logp_R[row]) == pytest.approx(float(whole_V[token]), abs=1e-4)
            if temperature < 1e-6:
                assert token == int(logit_V.argmax()) and float(found.sampling_logp_R[row]) == 0
                continue
            kept = kept_by_definition(logit_V.tolist(), Sampling(temperature=1.0, top_k=top_k))
            own_V = torch.full_like(logit_V, -math.inf)
            own_V[kept] = logit_V[kept] / temperature
            own_V = own_V.log_softmax(-1)
            assert float(found.sampling_logp_R[row]) == pytest.approx(float(own_V[token]), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_divides_the_logits(temperature):
    expected = CHANCE ** (1 / temperature)
    expected /= expected.sum()
    assert ((shares(Sampling(temperature=temperature)) - expected).abs() < 0.015).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9])
def test_no_temperature_is_greedy(temperature):
    assert pick(LOGITS_BV * 1e6, Sampling(temperature=temperature, top_p=0.5)).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e300])
def test_any_temperature_fits_into_float32(temperature):
    """It is uniform, without a warning that a number does not fit (a test fails on warnings here)."""
    rows = Rows.empty(1)
    with np.errstate(over="raise"):
        rows.put(0, Sampling(temperature=temperature), temperature)
    assert torch.equal(warp_logits(torch.tensor([[1.0, -50.0, 90.0]]), rows).softmax(-1), torch.full((1, 3), 1 / 3))


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
