"""Several engines in one thread: events come once a step, whoever asks; closing waits or ends what runs."""

from __future__ import annotations

import threading

import pytest
from small_models import small_model
from user_errors import raises_user_error

from penjing.infer.engine import Engine
from penjing.infer.engine_thread import EngineThread
from penjing.infer.generate import make_engine
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling

PATIENCE = 60  # seconds: a guard against a thread that hangs


class Desk:
    """Gathers what is delivered."""

    def __init__(self):
        self.events, self.lots, self.changed = {}, [], threading.Condition()

    def __call__(self, model, events):
        with self.changed:
            self.lots.append(len(events))
            for event in events:
                self.events.setdefault((model, event.request_id, event.answer), []).append(event)
            self.changed.notify_all()

    def ended(self):
        return [key for key, events in self.events.items() if events[-1].finish_reason]

    def wait(self, ready):
        with self.changed:
            assert self.changed.wait_for(ready, PATIENCE)


@pytest.fixture
def made():
    models = [small_model(seed=seed, max_position_embeddings=4000) for seed in (1, 2)]
    desk = Desk()
    engines = {name: make_engine(model, slots=3) for name, model in zip("ab", models, strict=True)}
    thread = EngineThread(engines, desk)
    yield thread, desk, engines
    thread.close()
    for engine in engines.values():
        engine.close()


def ask(tokens=8, **options):
    return Request(**{"prompt": [3, 4], "max_new_tokens": tokens, "sampling": Sampling(temperature=1.0), **options})


def test_many_threads_ask_two_models(made):
    thread, desk, engines = made
    asked = []

    def client(number):
        for turn in range(5):
            model = "ab"[(number + turn) % 2]
            asked.append((model, thread.submit(model, ask(seeds=(number, turn), client=str(number)))))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(PATIENCE)
    desk.wait(lambda: len(desk.ended()) == 60)
    assert {key[:2] for key in desk.ended()} == set(asked) and len(set(asked)) == 30
    told = thread.statistics()
    assert sum(one["tokens_written_total"] for one in told.values()) == 60 * 8
    assert all(one["active"] == one["waiting"] == 0 and one["slots"] == 3 for one in told.values())
    assert sum(desk.lots) > len(desk.lots), "events of a step come together"
    assert all(engine.idle for engine in engines.values())


def test_cancelling_and_closing(made):
    thread, desk, _ = made
    first, second = (thread.submit("a", ask(tokens=3900)) for _ in range(2))
    desk.wait(lambda: {("a", first, 0), ("a", second, 0)} <= desk.events.keys())
    thread.cancel("a", first)
    desk.wait(lambda: ("a", first, 0) in desk.ended())
    assert desk.events["a", first, 0][-1].finish_reason == "cancelled"
    short = thread.submit("b", ask(tokens=3))
    thread.close()
    assert desk.events["a", second, 0][-1].finish_reason == "cancelled"
    assert desk.events["b", short, 0][-1].finish_reason in ("length", "cancelled")
    with raises_user_error(where="engine"):
        thread.submit("a", ask())


def test_a_step_that_fails_ends_its_requests_and_not_the_thread(made, monkeypatch):
    thread, desk, engines = made
    step = Engine.step

    def broken(engine):
        if engine is engines["a"]:
            raise RuntimeError("ours")
        return step(engine)

    monkeypatch.setattr(Engine, "step", broken)
    wrong = thread.submit("a", ask())
    desk.wait(lambda: ("a", wrong, 0) in desk.ended())
    assert str(desk.events["a", wrong, 0][-1].error) == "ours"
    monkeypatch.undo()
    good = thread.submit("a", ask())
    desk.wait(lambda: ("a", good, 0) in desk.ended())
    assert desk.events["a", good, 0][-1].finish_reason == "length"


def test_nothing_to_do_takes_no_step(made):
    thread, desk, _ = made
    thread.submit("a", ask(tokens=3))
    desk.wait(lambda: len(desk.ended()) == 1)
    assert {name: one["steps_total"] for name, one in thread.statistics().items()} == {"a": 3, "b": 0}
