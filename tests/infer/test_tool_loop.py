"""Answers of several turns: as a plain twin writes them, one at a time, reading everything anew for each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import rows_of, small_model

from penjing.infer.generate import sample_batch
from penjing.infer.requests import InjectedTokens, Request, Turn
from penjing.infer.sample import Sampling, sample_tokens

STOP = {5, 11}
CALL = 7  # a turn in which this was said is followed by something
SHAPES = {
    "qwen3": {},
    "window": {"architecture": "qwen2", "sliding_window": 6},
    "experts": {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.fixture(params=list(SHAPES))
def model(request):
    shape = {
        "vocab_size": 24, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 40, "max_position_embeddings": 80,
        "rope_theta": 1e4, "tie_word_embeddings": False, **SHAPES[request.param],
    }  # fmt: skip
    return small_model(seed=3, noise=0.1, sharpen=2, **shape).eval()


def make_requests(num_prompts=5, answers=3):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(12, 24, generator.integers(1, 20)).tolist() for _ in range(num_prompts)]
    return [
        Request(prompt=prompt, seeds=[100 * index + number for number in range(answers)])
        for index, prompt in enumerate(prompts)
    ]


def after(ids, number):
    """What follows a turn; depends on all that was said in it."""
    if CALL not in ids or number >= 4:
        return None
    return [1, 2, sum(ids) % 24, *range(12, 12 + len(ids) % 9)]


def end_turn(turns: list[Turn]):
    given = [after(turn.ids, turn.number) for turn in turns]
    return [
        None if ids is None else InjectedTokens(ids, (turn.number, tuple(turn.ids)))
        for turn, ids in zip(turns, given, strict=True)
    ]


@torch.no_grad()
def by_hand(model, prompt, seed, sampling, limit):
    """(ids, log-probabilities, said, ended) without cache, batch or slots."""
    uniform = np.random.Generator(np.random.PCG64(seed)).random(limit, dtype=np.float32)
    room = min(limit, model.config.max_position_embeddings - len(prompt))
    ids, logp, said, turn, number = [], [], [], [], 1
    while True:
        logits_TV = model(torch.tensor([[*prompt, *ids]]))
        logits_1V = (logits_TV[0] if isinstance(logits_TV, tuple) else logits_TV)[0, -1:]
        drawn = sample_tokens(logits_1V, uniform[len(ids) : len(ids) + 1], rows_of([sampling]))
        ids.append(int(drawn.id_R))
        turn.append(ids[-1])
        logp.append(float(drawn.logp_R))
        said.append(True)
        if ids[-1] in STOP:
            given = after(turn, number)
            if given is None:
                return ids, logp, said, "stop"
            if len(ids) + len(given) >= room:
                return ids, logp, said, "length"
            ids, logp, said = ids + given, logp + [0.0] * len(given), said + [False] * len(given)
            turn, number = [], number + 1
        elif len(ids) == room:
            return ids, logp, said, "length"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
@pytest.mark.parametrize("slots", [2, 64])
def test_the_plain_twin_says_the_same(model, sampling, slots):
    requests = make_requests()
    written = sample_batch(
        model, requests, max_new_tokens=36, stop=STOP, sampling=sampling, slots=slots, on_turn_end=end_turn
    )
    turns, ends = [], set()
    for request, given in zip(requests, written, strict=True):
        for seed, each in zip(request.seeds, given, strict=True):
            ids, logp, said, ended = by_hand(model, request.prompt, seed, sampling, 36)
            assert (each.ids, each.finish_reason) == (ids, ended)
            assert (each.is_sampled or [True] * len(ids)) == said
            assert each.is_sampled is None or not all(each.is_sampled)
            torch.testing.assert_close(torch.tensor(each.logp), torch.tensor(logp), rtol=1e-4, atol=1e-4)
            assert all(value == 0 for value, own in zip(each.sampling_logp, said, strict=True) if not own)
            assert said[-1], "an answer ends with what the model said"
            assert [number for number, _ in each.notes] == list(range(1, len(each.notes) + 1))
            turns.append(len(each.notes) + 1)
            ends.add(ended)
    if not sampling.is_greedy:
        assert {1, 2} <= set(turns), "few went on: the test shows little"
        assert ends == {"stop", "length"}


def test_nothing_changes_where_nothing_follows(model):
    requests = make_requests()
    plain = sample_batch(model, requests, max_new_tokens=20, stop=STOP, sampling=Sampling(temperature=1.0), slots=7)
    followed = sample_batch(
        model, requests, max_new_tokens=20, stop=STOP, sampling=Sampling(temperature=1.0), slots=7,
        on_turn_end=lambda turns: [None] * len(turns),
    )  # fmt: skip
    assert plain == followed


def test_what_has_no_room_is_not_read(model):
    (given,) = sample_batch(
        model, [Request(prompt=[13, 14], seeds=range(40))], max_new_tokens=12, stop=STOP,
        sampling=Sampling(temperature=1.0), on_turn_end=lambda turns: [InjectedTokens([1] * 11, None)] * len(turns),
    )  # fmt: skip
    assert all(each.is_sampled is None and not each.notes and each.finish_reason == "length" for each in given)
    assert any(each.ids[-1] in STOP for each in given)
