"""The engine: whoever else is answered, each answer is what it is alone; nobody starves; one's faults are one's own."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.infer.engine import Engine
from penjing.infer.generate import generate, make_forward
from penjing.infer.requests import InjectedTokens, Request
from penjing.infer.sample import Sampling
from penjing.infer.torch_forward import TorchForward
from penjing.model.lora import AdapterSize, adaptable, adapter_scope, attach, set_adapter

STOP = {5, 11}
DRAWN = Sampling(temperature=1.0)
VOCAB = 48


@pytest.fixture(scope="module")
def model():
    return small_model(
        seed=3, noise=0.1, sharpen=4, vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, max_position_embeddings=160, rope_theta=1e4, tie_word_embeddings=False,
    ).eval()  # fmt: skip


def make_engine(model, slots=4, chunk=16, forward=make_forward, **options):
    made = forward(model, num_slots=slots, max_tokens=model.config.max_position_embeddings)
    return Engine(made, prefill_chunk=chunk, **options)


def ask(prompt, *, tokens=10, **options):
    return Request(**{"prompt": prompt, "max_new_tokens": tokens, "stop": STOP, "sampling": DRAWN, **options})


def prompts(count, seed=0, longest=60):
    generator = np.random.default_rng(seed)
    return [generator.integers(12, VOCAB, generator.integers(1, longest)).tolist() for _ in range(count)]


def run(engine, requests=()):
    """All events by ticket and answer."""
    request_ids = [engine.submit(request) for request in requests]
    found = {
        (request_id, number): []
        for request_id in request_ids
        for number in range(len(requests[request_id - request_ids[0]].seeds))
    }
    while not engine.idle:
        for event in engine.step():
            found.setdefault((event.request_id, event.answer), []).append(event)
    return found


def said(events):
    """(ids, log-probabilities, how it ended) of an answer's events."""
    tokens = [event.token for event in events if event.token is not None]
    assert [bool(event.finish_reason) for event in events] == [False] * (len(events) - 1) + [True]
    return [token.id for token in tokens], [token.logp for token in tokens], events[-1].finish_reason


def alone(model, request, **options):
    with make_engine(model, **{"slots": 1, **options}) as engine:
        return [said(events) for events in run(engine, [request]).values()]


STYLES = [
    Sampling(),
    DRAWN,
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.2, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1, presence_penalty=1.0),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.9, frequency_penalty=0.5, logit_bias={20: 3.0, 21: -100.0}),
    Sampling(temperature=0.5, top_k=9, top_p=0.9, repetition_penalty=1.1),
]


@pytest.mark.parametrize(("forward", "longest"), [(make_forward, 60), (TorchForward, 20)])
def test_every_answer_is_what_it_is_alone_to_the_last_bit(model, forward, longest):
    """Prompts of all lengths, some of them alike, each drawn in its own way, with few slots and in small chunks.

    By torch where all attend over as many positions as it rounds up to.
    """
    many = prompts(24, longest=longest)
    many[5], many[9] = many[2], many[2] + [20, 21]
    requests = [
        ask(
            prompt, sampling=STYLES[number % len(STYLES)], seeds=range(number, number + 1 + number % 3),
            client=str(number % 4),
        )
        for number, prompt in enumerate(many)
    ]  # fmt: skip
    with make_engine(model, slots=5, forward=forward) as engine:
        found = run(engine, requests)
    for request_id, request in enumerate(requests):
        expected = alone(model, request, forward=forward)
        assert [said(found[request_id, number]) for number in range(len(request.seeds))] == expected
    assert len({len(said(events)[0]) for events in found.values()}) >= 2


@pytest.mark.parametrize("forward", [make_forward, TorchForward])
def test_a_prompt_read_in_chunks_is_the_prompt_read_at_once(model, forward):
    for prompt in prompts(6, seed=4, longest=100):
        request = ask(prompt, sampling=Sampling())
        expected = alone(model, request, chunk=1000)[0]
        for chunk in (1, 7, 16, 64):
            ids, logp, ended = alone(model, request, chunk=chunk, forward=forward)[0]
            assert (ids, ended) == (expected[0], expected[2])
            np.testing.assert_allclose(logp, expected[1], atol=3e-5 if forward is TorchForward else 0)


@pytest.mark.parametrize("forward", [make_forward, TorchForward])
def test_a_shared_beginning_is_read_once_and_changes_nothing(model, forward):
    system = prompts(1, seed=7, longest=70)[0][:1] + list(range(12, 12 + 35)) * 2
    requests = [ask(system + own, seeds=(number,)) for number, own in enumerate(prompts(12, seed=8, longest=9))]
    expected = [alone(model, request, forward=forward)[0] for request in requests]

    def same(found):
        for one, other in zip((said(events) for events in found.values()), expected[-len(found) :], strict=True):
            assert (one[0], one[2]) == (other[0], other[2])
            np.testing.assert_allclose(one[1], other[1], atol=0 if forward is make_forward else 3e-5)

    with make_engine(model, slots=6, forward=forward) as engine:
        found = run(engine, requests)
        same(found)
        read, shared = engine.tokens_read, engine.tokens_shared
        assert read + shared == sum(len(request.prompt) for request in requests)
        assert shared >= 11 * 64 and read < 12 * 9 + 71 + 12 * 16
        told = [next(event.cached_tokens for event in events if event.token) for events in found.values()]
        assert sum(told) == shared and told[0] == 0
        # And again, now that all slots are free and the prompts stand in some of them.
        same(run(engine, requests[-6:]))
        assert engine.tokens_read - read <= 6 * 16


def test_a_conversation_goes_on_in_its_slot(model):
    with make_engine(model, slots=3) as engine:
        talk = prompts(1, seed=2)[0]
        for turn in range(3):
            before = engine.tokens_shared
            request = ask(talk, tokens=8, seeds=(turn,))
            ((events,),) = [run(engine, [request]).values()]
            ids, _, _ = said(events)
            assert [ids] == [each[0] for each in alone(model, request)]
            if turn:
                assert engine.tokens_shared - before >= len(talk) - 8 - 16 - 9
            talk = [*talk, *ids, *range(12, 20)]


def test_answers_to_one_prompt_read_it_once(model):
    prompt = prompts(1, seed=1, longest=100)[0] * 2
    request = ask(prompt, seeds=range(9), tokens=6)
    with make_engine(model, slots=3) as engine:
        found = run(engine, [request])
        assert engine.tokens_read == len(prompt)
        assert engine.tokens_shared == 8 * len(prompt)
    assert [said(events) for events in found.values()] == alone(model, request)
    assert len({tuple(said(events)[0]) for events in found.values()}) > 3


def test_what_is_cancelled_frees_its_slot_in_the_same_step(model):
    with make_engine(model, slots=2) as engine:
        first = [engine.submit(ask(prompt, stop=(), tokens=50)) for prompt in prompts(2, longest=10)]
        for _ in range(4):
            engine.step()
        assert engine.num_active == 2
        waiting = engine.submit(ask([20, 21], stop=(), tokens=3))
        unread = engine.submit(ask([20, 22], stop=()))
        engine.step()
        assert engine.num_waiting == 2
        for request_id in (first[0], unread, first[0], 10**6):
            engine.cancel(request_id)
        events = engine.step()
        ends = [(event.request_id, event.finish_reason) for event in events if event.finish_reason]
        assert ends == [(first[0], "cancelled"), (unread, "cancelled")]
        assert waiting in {event.request_id for event in events if event.token}
        rest = run(engine)
        assert {request_id for request_id, _ in rest} == {first[1], waiting}


def test_a_fault_of_ones_own_code_ends_ones_own_request_only(model):
    def broken(*_):
        raise ValueError("mine")

    class Grammar:
        finished = False
        allowed = accept = staticmethod(lambda *_: None)

    def grammar(**changes):
        return lambda: type("Broken", (Grammar,), changes)()

    good = [ask(prompt, seeds=(1, 2)) for prompt in prompts(4)]
    bad = [
        ask([20, 21], should_stop=broken, seeds=(1, 2, 3)),
        ask([20, 22], grammar=broken),
        ask([20, 23], grammar=grammar(allowed=broken)),
        ask([20, 23], grammar=grammar(allowed=lambda _: bytes(6))),
        ask([20, 23], grammar=grammar(accept=broken)),
        ask([20, 23], grammar=grammar(finished=property(broken))),
        ask([20, 24], on_turn_end=broken, stop=range(VOCAB)),
        ask([20, 24], on_turn_end=lambda _: [], stop=range(VOCAB)),
        ask([20, 24], on_turn_end=lambda _: [InjectedTokens([VOCAB], None)], stop=range(VOCAB)),
    ]
    with make_engine(model, slots=3) as engine:
        found = run(engine, [*good, *bad])
        assert engine.num_active == 0
    for (request_id, number), events in found.items():
        if request_id < len(good):
            assert said(events) == alone(model, good[request_id])[number]
        else:
            assert events[-1].finish_reason == "error" and isinstance(events[-1].error, ValueError)
            assert all(event.token is None for event in events)


def test_clients_take_turns(model):
    """Whoever asks first with a hundred requests does not keep another waiting, neither for a slot nor with a long
    prompt."""
    with make_engine(model, slots=4) as engine:
        greedy = [ask(prompt, stop=(), tokens=4, client="many") for prompt in prompts(100, longest=20)]
        for request in greedy:
            engine.submit(request)
        for _ in range(5):
            engine.step()
        late = engine.submit(ask([20, 21, 22], stop=(), tokens=2, client="one"))
        events = [event for _ in range(8) for event in engine.step() if event.request_id == late]
        assert events and events[-1].finish_reason == "length"
    with make_engine(model, slots=4) as engine:
        engine.submit(ask([20] * 150, client="long", stop=()))
        engine.step()
        late = engine.submit(ask([21] * 4, client="short", stop=(), tokens=1))
        assert any(event.request_id == late for _ in range(3) for event in engine.step())


@pytest.mark.parametrize("most", [1, 3, 6])
def test_out_of_memory_makes_fewer_at_once_and_loses_nobody(model, monkeypatch, most):
    requests = [ask(prompt, seeds=(1, 2), sampling=Sampling()) for prompt in prompts(6, longest=20)]
    expected = [alone(model, request) for request in requests]
    engine = make_engine(model, slots=8)
    whole = engine.forward

    class Small:
        def __getattr__(self, name):
            return getattr(whole, name)

        def __call__(self, slot_N, *rest):
            if len(set(slot_N.tolist())) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return whole(slot_N, *rest)

    engine.forward = Small()
    with engine:
        found = run(engine, requests)
    assert engine.capacity <= max(1, most)
    for (request_id, number), events in found.items():
        assert said(events)[0] == expected[request_id][number][0]


def fails_once(engine, at):
    """The forward pass runs out of memory once, at the first pass for which `at(slots)` is true."""
    whole, done = engine.forward, []

    class Short:
        def __getattr__(self, name):
            return getattr(whole, name)

        def __call__(self, slot_N, *rest):
            if not done and at({*slot_N.tolist()}):
                done.append(True)
                raise MemoryError
            return whole(slot_N, *rest)

    engine.forward = Short()
    return done


def test_after_an_out_of_memory_the_oldest_answers_go_on(model):
    with make_engine(model, slots=6) as engine:
        ids = [engine.submit(ask([20 + number], stop=(), tokens=30)) for number in range(6)]
        for _ in range(4):
            engine.step()
        done = fails_once(engine, lambda _: True)
        assert engine.step() == [] and done
        assert [event.request_id for event in engine.step()] == ids[:3]


def test_prompt_scores_are_given_once_though_the_prompt_is_read_again(model):
    """The memory runs out when a part of the prompt was scored; the answer waits, and begins anew."""
    prompt = prompts(1, seed=5, longest=100)[0][:1] + list(range(12, 46)) * 2
    with make_engine(model, slots=2) as engine:
        engine.submit(ask([20, 21], stop=(), tokens=6))
        engine.step()
        scored = engine.submit(ask(prompt, prompt_logprobs=True, tokens=2, stop=()))
        for _ in range(2):
            engine.step()
        done = fails_once(engine, lambda slots: len(slots) == 2)
        events = [event for event in run(engine)[scored, 0] if event.prompt_logprobs]
    logp_TV = logits_of(model, prompt).log_softmax(-1)
    assert done and len(events) == 1
    assert [token.id for token in events[0].prompt_logprobs] == prompt
    wanted = logp_TV[range(len(prompt) - 1), prompt[1:]].numpy()
    np.testing.assert_allclose([token.logp for token in events[0].prompt_logprobs[1:]], wanted, atol=3e-5)


def test_a_client_whose_prompts_fill_a_pass_leaves_slots_to_others(model):
    with make_engine(model, slots=4, chunk=16) as engine:
        for number in range(10):
            engine.submit(ask([12 + number] * 150, client="many", stop=(), tokens=1))
        engine.step()
        assert engine.num_active == 1
        late = engine.submit(ask([21] * 4, client="one", stop=(), tokens=1))
        assert late in {event.request_id for _ in range(2) for event in engine.step()}


def test_the_slot_that_was_used_longest_ago_is_overwritten(model):
    """Of three prompts the second is the one that nobody asked for again."""
    first, second, third, fourth = ([12 + number] * 40 for number in range(4))
    with make_engine(model, slots=3) as engine:
        cached = [
            run(engine, [ask(prompt, stop=(), tokens=2)]).popitem()[1][0].cached_tokens > 0
            for prompt in (first, second, third, first, fourth, third, first, second)
        ]
    assert cached == [False, False, False, True, False, True, True, False]


def test_once_there_is_memory_again_as_many_are_answered_as_before(model):
    engine = make_engine(model, slots=8)
    whole, most, seen = engine.forward, [3], []

    class Small:
        def __getattr__(self, name):
            return getattr(whole, name)

        def __call__(self, slot_N, *rest):
            if len(set(slot_N.tolist())) > most[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            seen.append(len(set(slot_N.tolist())))
            return whole(slot_N, *rest)

    engine.forward = Small()
    requests = [ask([20 + number], stop=(), tokens=100) for number in range(16)]
    with engine:
        expected = run(engine, requests)
        assert engine.capacity < 8 and max(seen) <= 3
        most[0] = 8
        found = run(engine, [*requests, *requests])
    assert engine.capacity == 8 == max(seen)
    ids = [[said(events)[0] for events in events_of.values()] for events_of in (expected, found)]
    assert ids[1] == ids[0] * 2


def test_a_pass_of_one_answer_that_does_not_fit_ends_it(model):
    engine = make_engine(model)
    whole = engine.forward

    class Full:
        def __getattr__(self, name):
            return getattr(whole, name)

        def __call__(self, *_):
            raise MemoryError

    engine.forward = Full()
    with engine:
        found = run(engine, [ask([20]), ask([21])])
    assert [events[-1].finish_reason for events in found.values()] == ["error", "error"]
    with make_engine(model, recover=False) as engine:
        engine.forward.__class__ = type("Broken", (type(engine.forward),), {"__call__": Full.__call__})
        engine.submit(ask([20]))
        with pytest.raises(MemoryError):
            engine.step()


def broken_in(owner, name, breaks):
    """`owner.name` raises what `breaks(*arguments)` returns, if anything."""
    whole = getattr(owner, name)

    def call(*arguments):
        if (error := breaks(*arguments)) is not None:
            raise error
        return whole(*arguments)

    setattr(owner, name, call)


@pytest.mark.parametrize("most", [1, 3, 6])
def test_out_of_memory_while_sampling_loses_no_answer(model, most):
    requests = [
        ask(prompt, seeds=(1, 2), sampling=STYLES[number], prompt_logprobs=number == 1, top_logprobs=2)
        for number, prompt in enumerate(prompts(8, longest=20))
    ]
    expected = [alone(model, request) for request in requests]
    with make_engine(model, slots=8) as engine:
        failed = []

        def breaks(slot_R, *rest):
            failed.append(len(slot_R) > most)
            return torch.OutOfMemoryError("CUDA out of memory") if failed[-1] else None

        broken_in(engine._sampler, "sample", breaks)
        found = run(engine, requests)
        assert engine.capacity <= max(1, most) and any(failed)
    for (request_id, number), events in found.items():
        assert said(events) == expected[request_id][number]


def test_memory_for_not_even_one_row_ends_that_request_alone(model, monkeypatch):
    """In sampling, and in the scores of a prompt."""
    from penjing.infer import engine as module

    requests = [ask(prompt, stop=()) for prompt in prompts(5, longest=20)]
    requests[2] = ask([20, 47, 21, 22], stop=(), sampling=Sampling(presence_penalty=1.0))
    requests[3] = ask([20, 46, 21, 22], stop=(), prompt_logprobs=True)
    expected = [alone(model, request)[0] for request in requests]
    monkeypatch.setattr(module, "score", module.score)  # restored after the test
    with make_engine(model, slots=4) as engine:
        penalised = engine._sampler._penalties._sampling
        broken_in(engine._sampler, "sample", lambda slot_R, *_: MemoryError() if {*slot_R} & {*penalised} else None)
        broken_in(module, "score", lambda *_: MemoryError())
        found = run(engine, requests)
    for (request_id, _), events in found.items():
        if request_id in (2, 3):
            assert events[-1].finish_reason == "error" and isinstance(events[-1].error, MemoryError)
        else:
            assert said(events) == expected[request_id]


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError()])
def test_a_prefix_that_cannot_be_copied_ends_one_request_or_is_read_again(model, error):
    system = list(range(12, 47)) * 2
    requests = [ask([*system, 20 + number], seeds=(number,), stop=(), tokens=40) for number in range(6)]
    expected = [alone(model, request)[0] for request in requests]
    with make_engine(model, slots=4) as engine:
        calls = []

        def breaks(source, target, tokens):
            calls.append(target)
            if len(calls) == 2:
                whole(source, target, tokens // 2)  # it breaks half way
                return error
            return None

        whole = engine.forward.copy_prefix
        broken_in(engine.forward, "copy_prefix", breaks)
        found = run(engine, requests)
        assert len(calls) > 2 and engine.num_active == engine.num_waiting == 0
        again = run(engine, requests)
    ended = [events[-1].error is None for events in found.values()]
    assert ended.count(False) == (not isinstance(error, MemoryError))
    for events, wanted, went_well in zip(found.values(), expected, ended, strict=True):
        assert said(events) == wanted if went_well else len(events) == 1 and events[0].error is error
    assert [said(events) for events in again.values()] == expected


@pytest.mark.parametrize("forward", [make_forward, TorchForward])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_their_request_alone(model, forward, value):
    """The embedding of one token is broken; slots and prefixes that its requests leave behind are used again."""
    broken = copy.deepcopy(model)
    broken.embed.weight.data[47, 3] = value
    good = [ask(prompt, sampling=STYLES[number], seeds=(1, 2)) for number, prompt in enumerate(prompts(8, longest=20))]
    good = [request for request in good if 47 not in request.prompt]
    begin = list(range(12, 44))
    bad = [
        ask([20, 47, 21], seeds=(1, 2)),
        ask([*begin, 47, 21], sampling=Sampling(), prompt_logprobs=True),
        ask([21] * 30 + [47], sampling=Sampling(temperature=0.8, top_p=0.5)),
        ask([22] * 20 + [47], tokens=0, prompt_logprobs=True),
        ask([47], sampling=Sampling()),
    ]
    no_47 = [Sampling(**{**vars(request.sampling), "logit_bias": {47: -1e9}}) for request in good]
    good = [ask(request.prompt, sampling=style, seeds=(1, 2)) for request, style in zip(good, no_47, strict=True)]
    good.append(ask([*begin, 20], sampling=Sampling(logit_bias={47: -1e9})))
    expected = [alone(model, request, forward=forward) for request in good]
    with make_engine(broken, slots=3, forward=forward) as engine:
        found = run(engine, [*bad, *good, *bad])
    for (request_id, number), events in found.items():
        if len(bad) <= request_id < len(bad) + len(good):
            assert said(events) == expected[request_id - len(bad)][number]
        else:
            assert events[-1].finish_reason == "error" and "NaN" in str(events[-1].error)
            assert all(event.token is None for event in events)


@pytest.mark.parametrize("forward", [make_forward, TorchForward])
def test_a_cache_that_gave_no_numbers_is_not_used_again(model, forward):
    request = ask([*range(12, 46)], sampling=Sampling(), stop=())
    expected = alone(model, request, forward=forward)[0]
    with make_engine(model, slots=2, forward=forward) as engine:
        whole, passes = engine.forward, []

        class Once:
            def __getattr__(self, name):
                return getattr(whole, name)

            def __call__(self, *rest):
                passes.append(whole(*rest))
                return passes[-1] * math.nan if len(passes) == 3 else passes[-1]

        engine.forward = Once()
        first, second = (run(engine, [request])[number, 0] for number in range(2))
        assert first[-1].finish_reason == "error" and said(second) == expected


def test_a_slot_that_is_overwritten_in_part_is_not_used_again(model):
    long, other = [*range(12, 46), *range(12, 46)], [*range(45, 11, -1), *range(45, 11, -1)]
    requests = [ask(other, tokens=1), ask(long, tokens=60, stop=()), ask([*long, 20]), ask(other, tokens=6)]
    expected = alone(model, requests[3])[0]
    with make_engine(model, slots=2) as engine:
        run(engine, requests[:1])
        engine.submit(requests[1])
        for _ in range(8):
            engine.step()
        whole = engine.forward.copy_prefix
        broken_in(engine.forward, "copy_prefix", lambda *rest: whole(*rest) or RuntimeError("at the end"))
        assert run(engine, requests[2:3])[2, 0][-1].error is not None
        engine.forward.copy_prefix = whole
        assert said(run(engine, requests[3:])[3, 0]) == expected


@torch.no_grad()
def logits_of(model, ids):
    found = model(torch.tensor([ids]))
    return (found[0] if isinstance(found, tuple) else found)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_of_prompt_answer_and_alternatives(model, temperature):
    prompt = prompts(1, seed=5, longest=100)[0]
    request = ask(
        prompt, prompt_logprobs=True, top_logprobs=4, score_temperature=temperature, seeds=(3, 4),
        sampling=Sampling(temperature=0.9, top_k=3, presence_penalty=0.5),
    )  # fmt: skip
    with make_engine(model) as engine:
        found = run(engine, [ask([*prompt, 30]), request])  # what another has read of it is read again
    for number in range(2):
        events = found[1, number]
        ids = [*prompt, *said(events)[0]]
        logp_TV = (logits_of(model, ids) / temperature).log_softmax(-1)
        tokens = [event.token for event in events if event.token]
        scored = list(enumerate(tokens, len(prompt)))
        if number == 0:
            (given,) = [event.prompt_logprobs for event in events if event.prompt_logprobs]
            assert [token.id for token in given] == prompt and math.isnan(given[0].logp)
            scored += list(enumerate(given))[1:]
        for place, token in scored:
            assert token.id == ids[place]
            assert token.logp == pytest.approx(float(logp_TV[place - 1, token.id]), abs=3e-5)
            best = logp_TV[place - 1].topk(4)
            assert [index for index, _ in token.top_logprobs] == best.indices.tolist()
            np.testing.assert_allclose([value for _, value in token.top_logprobs], best.values.numpy(), atol=3e-5)


def test_log_probabilities_after_a_penalty_are_the_models_own(model):
    style = Sampling(temperature=1.0, presence_penalty=2.0, logit_bias={20: 4.0})
    with make_engine(model) as engine:
        found = run(engine, [ask([20, 21], sampling=style, stop=()), ask([20, 22], stop=())])
    for events, prompt in zip(found.values(), ([20, 21], [20, 22]), strict=True):
        ids, logp, _ = said(events)
        expected_TV = logits_of(model, [*prompt, *ids])[1:-1].log_softmax(-1)
        np.testing.assert_allclose(logp, expected_TV[range(len(ids)), ids].numpy(), atol=3e-5)


def test_a_prompt_may_be_scored_and_nothing_written(model):
    prompt = [20] * 160  # as long as the model reads at all
    with make_engine(model) as engine:
        ((events,),) = [run(engine, [ask(prompt, tokens=0, prompt_logprobs=True)]).values()]
    assert len(events) == 1 and events[0].finish_reason == "length" and events[0].token is None
    assert len(events[0].prompt_logprobs) == 160


def test_penalties_biases_and_masks_are_what_they_are_by_hand(model):
    class Odd:
        """Odd ids only, and the end after the fifth."""

        def __init__(self):
            self.count = 0

        @property
        def finished(self):
            return self.count == 5

        def allowed(self):
            return np.packbits(np.arange(VOCAB) % 2 == 1, bitorder="little").tobytes()

        def accept(self, index):
            assert index % 2
            self.count += 1

    prompt = prompts(1, seed=6)[0]
    style = Sampling(
        repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9, logit_bias={21: 6.5, 40: -9.0}
    )
    with make_engine(model) as engine:
        free, masked = run(
            engine, [ask(prompt, sampling=style, stop=()), ask(prompt, sampling=style, stop=(), grammar=Odd)]
        ).values()
    for events, is_masked in ((free, False), (masked, True)):
        ids, logp, ended = said(events)
        assert (len(ids), ended) == ((5, "stop") if is_masked else (10, "length"))
        assert 0 < ids.count(21) < len(ids)
        for place, index in enumerate(ids):
            own_V = logits_of(model, prompt + ids[:place])[-1]
            assert logp[place] == pytest.approx(float(own_V.log_softmax(-1)[index]), abs=1e-5)
            changed_V = own_V.clone()
            for token in set(prompt + ids[:place]):
                changed_V[token] = changed_V[token] / 1.4 if changed_V[token] > 0 else changed_V[token] * 1.4
            for token in ids[:place]:
                changed_V[token] -= 0.9
            for token in set(ids[:place]):
                changed_V[token] -= 0.7
            changed_V[21] += 6.5
            changed_V[40] -= 9.0
            if is_masked:
                changed_V[0::2] = -math.inf
            assert index == int(changed_V.argmax())


def test_watching_ends_an_answer_with_the_token_it_saw(model):
    seen = []

    def watch(number, index):
        seen.append((number, index))
        return len([one for one, _ in seen if one == number]) == 3

    with make_engine(model) as engine:
        found = run(engine, [ask([20, 21], should_stop=watch, seeds=(1, 2), stop=())])
    for number in range(2):
        ids, _, ended = said(found[0, number])
        assert ended == "stop" and ids == [index for one, index in seen if one == number] and len(ids) == 3


def test_turns_of_one_request_follow_beside_others(model):
    def on_turn_end(turns):
        return [InjectedTokens([13, 14, 15], turn.number) if turn.number < 3 else None for turn in turns]

    request = ask([20, 21], on_turn_end=on_turn_end, stop=range(0, VOCAB, 2), tokens=40, seeds=(1, 2, 3))
    plain = [ask(prompt) for prompt in prompts(5)]
    with make_engine(model, slots=3) as engine:
        found = run(engine, [*plain, request])
    for number in range(3):
        events = found[5, number]
        assert said(events) == alone(model, request)[number]
        assert [event.injected.note for event in events if event.injected] in ([1, 2], [1])


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1] * 160}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"score_temperature": 0.0}, "score_temperature"),
        ({"seeds": (3, -1)}, "seed"),
        ({"adapter": "none"}, "adapter"),
    ],
)
def test_what_cannot_be_answered_is_refused(model, changes, where):
    with make_engine(model) as engine:
        with raises_user_error(where=where):
            engine.submit(ask(**{"prompt": [20], **changes}))
        assert engine.idle


def test_any_order_of_asking_and_cancelling(model):
    """Random clients, some of whom leave: everyone who stays gets his own text, and no slot is lost."""
    generator = np.random.default_rng(11)
    many = prompts(6, seed=12, longest=50)
    expected, asked, found = {}, {}, {}
    with make_engine(model, slots=3, chunk=16) as engine:
        left = 60
        while left or not engine.idle:
            for _ in range(generator.integers(0, 4) if left else 0):
                key = (int(generator.integers(6)), int(generator.integers(4)), int(generator.integers(1, 3)))
                request = ask(many[key[0]], seeds=range(key[1], key[1] + key[2]), client=str(key[1]))
                if key not in expected:
                    expected[key] = alone(model, request)
                asked[engine.submit(request)] = key
                left = max(0, left - 1)
            gone = int(generator.choice(list(asked))) if asked and generator.random() < 0.2 else None
            if gone is not None:
                engine.cancel(gone)
            for event in engine.step():
                found.setdefault((event.request_id, event.answer), []).append(event)
        assert engine.num_active == engine.num_waiting == 0
    ends = set()
    for (request_id, number), events in found.items():
        ids, logp, ended = said(events)
        whole = expected[asked[request_id]][number]
        assert (ids, logp) == (whole[0][: len(ids)], whole[1][: len(ids)])
        assert ended == "cancelled" or len(ids) == len(whole[0])
        ends.add(ended)
    assert ends == {"stop", "length", "cancelled"}


def test_generate_draws_each_text_from_its_own_numbers(model):
    many = prompts(7)
    texts = generate(model, many, max_new_tokens=8, stop=(), sampling=DRAWN, seed=4)
    assert texts == generate(model, many, max_new_tokens=8, stop=(), sampling=DRAWN, seed=4, rows=2)
    assert texts[:3] == generate(model, many[:3], max_new_tokens=8, stop=(), sampling=DRAWN, seed=4)


@pytest.fixture(scope="module")
def adapted(model):
    """The same model with two adapters, of other sizes and kinds of layers."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for name, rank, layers in (("one", 2, "q_proj"), ("two", 3, "_proj")):
        attach(
            model, name, {key: AdapterSize(rank=rank, scale=2.0) for key in adaptable(model) if key.endswith(layers)}
        )
        for key, parameter in model.named_parameters():
            if f".{name}." in key and key.endswith(".B"):
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize("forward", [make_forward, TorchForward])
@pytest.mark.parametrize("active", [None, "two"])
def test_each_request_has_its_own_adapter(adapted, forward, active):
    """In one batch, also where prompts are alike; without a name, the one that is in use."""
    set_adapter(adapted, active)
    many = [prompts(1, seed=9, longest=60)[0] * 2] * 4 + prompts(4, seed=10)
    adapters = [None, "", "one", "two"] * 2
    requests = [ask(prompt, adapter=name, stop=()) for prompt, name in zip(many, adapters, strict=True)]
    with make_engine(adapted, slots=3, forward=forward) as engine:
        texts = [said(events)[:2] for events in run(engine, requests).values()]
    for (ids, logp), prompt, name in zip(texts, many, adapters, strict=True):
        with adapter_scope(adapted, active if name is None else name or None):
            expected_TV = logits_of(adapted, [*prompt, *ids])[len(prompt) - 1 : -1].log_softmax(-1)
        np.testing.assert_allclose(logp, expected_TV[range(len(ids)), ids].numpy(), atol=1e-4)
    assert len({tuple(ids) for ids, _ in texts[:4]}) == 3  # two of them have the same
    set_adapter(adapted, None)
