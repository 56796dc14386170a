"""Continuous batching: the same answers whoever else is in the batch, and the log-probabilities of what was drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small_models import rows_of, small_model

from penjing.base.errors import UserError
from penjing.devices.cpu import Cpu
from penjing.infer import sample
from penjing.infer.generate import sample_batch
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling, sample_tokens, warp_logits
from penjing.model.linear import set_compute_dtype

GREEDY, DRAWN = Sampling(), Sampling(temperature=1.0)
STOP = {5, 11}
SHAPES = {
    "qwen3": {},
    "window": {"architecture": "qwen2", "sliding_window": 6},
    "experts": {"architecture": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def make_model(name="qwen3", max_tokens=48):
    shape = {
        "vocab_size": 37, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 40,         "max_position_embeddings": max_tokens, "rope_theta": 1e4,
        "tie_word_embeddings": False, **SHAPES[name],
    }  # fmt: skip
    return small_model(seed=3, noise=0.1, sharpen=4, **shape).eval()


@pytest.fixture(params=list(SHAPES))
def model(request):
    return make_model(request.param)


def make_requests(num_prompts=9, answers=4, seed=0, longest=20):
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(12, 37, generator.integers(1, longest)).tolist() for _ in range(num_prompts)]
    prompts[3] = prompts[0]
    return [
        Request(prompt=prompt, seeds=[100 * index + number for number in range(answers)])
        for index, prompt in enumerate(prompts)
    ]


def write(model, requests, sampling=DRAWN, **changes):
    return sample_batch(model, requests, **{"max_new_tokens": 12, "stop": STOP, "sampling": sampling, **changes})


def ids(answers):
    return [[each.ids for each in given] for given in answers]


@torch.no_grad()
def by_hand(model, prompt, limit):
    """Greedy text without a cache, batch or engine, and its log-probabilities."""
    said, logp = [], []
    while len(said) < limit and not (said and said[-1] in STOP):
        logits = model(torch.tensor([[*prompt, *said]]))
        logits_V = (logits[0] if isinstance(logits, tuple) else logits)[0, -1]
        said.append(int(logits_V.argmax()))
        logp.append(float(logits_V.log_softmax(-1)[said[-1]]))
    return said, logp


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_greedy_text_is_what_reading_everything_again_gives(model, slots):
    requests = make_requests(answers=2)
    for request, given in zip(requests, write(model, requests, GREEDY, slots=slots), strict=True):
        expected, logp = by_hand(model, request.prompt, 12)
        for each in given:
            assert each.ids == expected
            assert each.finish_reason == ("stop" if each.ids[-1] in STOP else "length")
            assert each.sampling_logp == [0.0] * len(each.ids)
            np.testing.assert_allclose(each.logp, logp, atol=1e-5)


def test_who_else_is_in_the_batch_has_no_part_in_an_answer(model):
    requests = make_requests()
    expected = ids(write(model, requests, slots=64))
    lengths = {len(answer) for given in expected for answer in given}
    assert len(lengths) > 3, "all ended at the same place: the test shows little"
    for slots in (1, 2, 5, 17):
        assert ids(write(model, requests, slots=slots)) == expected
    assert ids(write(model, requests[::-1], slots=5))[::-1] == expected
    alone = [ids(write(model, [Request(prompt=r.prompt, seeds=[s])]))[0][0] for r in requests for s in r.seeds]
    assert alone == [answer for given in expected for answer in given]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_nor_in_its_log_probabilities_to_the_last_bit(monkeypatch, window, dtype):
    """On a CPU, of a dense model whose sizes are multiples of 16: so two processes write what one does, and fewer slots
    what many do."""
    sizes = {
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "architecture": "qwen2",
        "sliding_window": window,
    }
    monkeypatch.setitem(SHAPES, "even", sizes)
    model = make_model("even")
    set_compute_dtype(model, dtype)
    requests = make_requests()
    expected = write(model, requests, slots=64)
    assert len({len(answer.ids) for given in expected for answer in given}) > 3
    for slots in (1, 2, 5, 17):
        assert write(model, requests, slots=slots) == expected
    halves = [write(model, requests[rank::2]) for rank in (0, 1)]
    assert [halves[index % 2][index // 2] for index in range(len(requests))] == expected
    alone = [write(model, [Request(prompt=r.prompt, seeds=[s])])[0][0] for r in requests for s in r.seeds]
    assert alone == [answer for given in expected for answer in given]


def test_prompts_read_in_several_passes_are_the_same(model, monkeypatch):
    requests = make_requests(num_prompts=20)
    expected = ids(write(model, requests))
    monkeypatch.setattr(Cpu, "prefill_chunk", 7)
    assert ids(write(model, requests, slots=7)) == expected


def test_seeds_make_answers_and_the_global_state_is_left_alone(model):
    before = torch.get_rng_state()
    prompt = [20, 21, 22]
    (first,) = ids(write(model, [Request(prompt=prompt, seeds=[1, *range(1, 20)])], Sampling(temperature=5.0)))
    assert first[0] == first[1]
    assert len({tuple(answer) for answer in first}) > 1
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "sampling",
    [DRAWN, Sampling(temperature=0.7), Sampling(temperature=1.3, top_k=6), Sampling(temperature=0.9, top_p=0.6)],
)
@pytest.mark.parametrize("score_temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_whole_text(model, sampling, score_temperature):
    requests = make_requests(num_prompts=4)
    for request, given in zip(
        requests, write(model, requests, sampling, slots=5, score_temperature=score_temperature), strict=True
    ):
        for each in given:
            with torch.no_grad():
                logits_TV = model(torch.tensor([[*request.prompt, *each.ids]]))
                logits_TV = (logits_TV[0] if isinstance(logits_TV, tuple) else logits_TV)[0]
            said_TV = logits_TV[len(request.prompt) - 1 : -1]
            token_T1 = torch.tensor(each.ids)[:, None]
            whole = (said_TV / score_temperature).log_softmax(-1).gather(1, token_T1)[:, 0]
            drawn = warp_logits(said_TV, rows_of([sampling] * len(said_TV))).log_softmax(-1).gather(1, token_T1)[:, 0]
            torch.testing.assert_close(torch.tensor(each.logp), whole, rtol=0, atol=3e-5)
            torch.testing.assert_close(torch.tensor(each.sampling_logp), drawn, rtol=0, atol=3e-5)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(12, generator=generator)
    sampling = Sampling(temperature=0.8, top_p=0.9)
    chances = warp_logits(logits_V[None], rows_of([sampling])).softmax(-1)[0]
    assert (chances == 0).any()
    many = 200_000
    uniform_B = torch.rand(many, generator=generator).numpy()
    counts = torch.bincount(
        sample_tokens(logits_V.expand(many, 12), uniform_B, rows_of([sampling] * many)).id_R, minlength=12
    )
    assert (counts[chances == 0] == 0).all()
    for count, chance in zip((counts / many).tolist(), chances.tolist(), strict=True):
        assert abs(count - chance) < 5 * math.sqrt(chance * (1 - chance) / many) + 1e-9


def test_the_ends_of_the_unit_interval_draw_real_tokens():
    logits_BV = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]]).repeat(2, 1)
    uniform_B = np.array([0.0, 1 - 2.0**-24], np.float32)
    assert sample_tokens(logits_BV, uniform_B, rows_of([DRAWN] * 2)).id_R.tolist() == [1, 3]


@pytest.mark.parametrize("found", [0, 4, 5], ids=["left out before", "left out behind", "none"])
def test_a_sum_that_is_off_by_a_rounding_error_draws_a_real_token(monkeypatch, found):
    # As a sum on CUDA may be, whose parts are taken side by side.
    wrong_B1 = torch.full((1, 1), found)
    monkeypatch.setattr(sample.torch, "searchsorted", lambda *_, **__: wrong_B1.clone())
    logits_BV = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    drawn = sample_tokens(logits_BV, np.array([0.5], np.float32), rows_of([DRAWN]))
    assert drawn.id_R.tolist() == [3]
    torch.testing.assert_close(drawn.logp_R, logits_BV.log_softmax(-1)[:, 3])


def test_prompt_and_answer_together_hold_at_most_max_tokens():
    model = make_model(max_tokens=32)
    requests = [Request(prompt=[20] * length, seeds=[1, 2]) for length in (31, 30, 3)]
    written = sample_batch(model, requests, max_new_tokens=100, stop=(), sampling=DRAWN)
    assert [[len(each.ids) for each in given] for given in written] == [[1, 1], [2, 2], [29, 29]]
    assert {each.finish_reason for given in written for each in given} == {"length"}


def test_no_answers_asked_none_written(model):
    assert sample_batch(model, [], max_new_tokens=3, stop=(), sampling=DRAWN) == []
    assert sample_batch(model, [Request(prompt=[1], seeds=[])], max_new_tokens=3, stop=(), sampling=DRAWN) == [[]]


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ([], "prompt: is empty; wanted at least one token"),
        ([2] * 48, "prompt: too long; got 48 tokens; wanted under 48"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(model, prompt, line):
    with pytest.raises(UserError) as caught:
        sample_batch(model, [Request(prompt=prompt, seeds=[0])], max_new_tokens=3, stop=(), sampling=DRAWN)
    assert str(caught.value) == line


def test_the_model_is_left_as_it_was(model):
    model.train()
    write(model, make_requests(num_prompts=4))
    assert model.training
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bfloat16_products_write_too():
    model = make_model()
    set_compute_dtype(model, torch.bfloat16)
    written = write(model, make_requests(), slots=5)
    assert all(given and all(each.ids for each in given) for given in written)


def test_what_was_left_out_counts_for_the_whole_softmax():
    """Logits log(1, 2, 5): of the likeliest two alone 5/7 is drawn, of all it is 5/8."""
    logits_BV = torch.tensor([[1.0, 2.0, 5.0]]).log()
    uniform_B = np.array([0.9], np.float32)
    said = sample_tokens(logits_BV, uniform_B, rows_of([Sampling(temperature=1.0, top_k=2)]))
    assert said.id_R.item() == 2
    assert said.logp_R.item() == pytest.approx(math.log(5 / 8))
    assert said.sampling_logp_R.item() == pytest.approx(math.log(5 / 7))
    hot = sample_tokens(logits_BV, uniform_B, rows_of([Sampling(temperature=0.5)], 0.5))
    assert hot.logp_R.item() == hot.sampling_logp_R.item() == pytest.approx(math.log(25 / 30))
