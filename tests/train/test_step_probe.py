"""How many steps are timed before step 1."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penjing.base.files import write_json
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.lora import Lora, adapt
from penjing.model.transformer import Transformer
from penjing.train import step_probe as probe


def test_a_forecast_is_kept_for_the_run_it_was_made_for(tmp_path):
    file = tmp_path / probe.FORECAST
    write_json(file, {"parameters": 10, "tokens": 1000, "predicted_loss_low": 1.0})
    for parameters, tokens, kept in ((10, 970, True), (10, 900, False), (11, 1000, False)):
        bill = SimpleNamespace(parameters=parameters, tokens=tokens)
        assert probe.foreseen_loss(file, bill) == ({"predicted_loss_low": 1.0} if kept else {})


class Rows:
    def fresh(self):
        return self

    def state(self):
        return {}

    def place(self):
        return {}

    def restore(self, state):
        pass

    def close(self):
        pass


@dataclass
class Parts:
    """What timing looks at."""

    num_steps: int
    accumulate: int = 2
    source: Any = None
    meter: Any = None
    schedule: Any = None


@pytest.fixture
def taken(monkeypatch):
    """Rounds as if each pass took so many seconds: `timed` gives what came of it, and the passes of each round."""

    def timed(pass_seconds, num_steps, accumulate=2, **more):
        rounds = []

        def round_(trial, steps):
            rounds.append(trial.accumulate)
            trial.meter.data_wait_seconds += 1.0 if len(rounds) == 1 else 0.0  # for the first batch
            return pass_seconds * trial.accumulate + (1.0 if len(rounds) == 1 else 0.0)

        monkeypatch.setattr(probe, "_round", round_)
        stage, size = SimpleNamespace(runs_ahead=True), SimpleNamespace(round_steps=1, probe_steps=5)
        strategy = SimpleNamespace(any=bool, world=1, device=torch.device("cpu"))
        parts = Parts(num_steps=num_steps, source=Rows())
        seconds, wait = probe._timed(None, stage, size, strategy, parts, accumulate, more.pop("share", 1.0), **more)
        assert seconds == pytest.approx([pass_seconds * accumulate] * len(seconds)) and wait == 0
        return rounds

    return timed


def test_of_slow_steps_two_are_timed_and_one_of_half_the_passes(taken):
    assert taken(1.0, num_steps=100) == [2, 2, 2]  # the first gets warm
    assert taken(1.0, num_steps=100, accumulate=1, share=0.5, warm=True) == [1]


def test_slow_steps_of_a_long_run_are_timed_for_longer(taken):
    assert taken(0.5, num_steps=1600) == [2] * (1 + 9)  # more than eight seconds, 0.5 % of the run


def test_quick_steps_are_taken_twice_and_timed_the_second_time(taken):
    rounds = taken(0.1, num_steps=100)
    assert rounds == [2] * 2 * (1 + 11)  # more than two seconds of steps


@pytest.mark.parametrize(("num_steps", "timed"), [(2, 4), (12, 6), (40, 20), (400, 20)])
def test_a_short_run_is_timed_for_fewer_steps(taken, num_steps, timed):
    assert taken(0.001, num_steps) == [2] * 2 * (1 + timed)
    assert not probe._sampled_enough([0.001] * (timed - 1), 1, num_steps)
    assert probe._sampled_enough([0.001] * timed, 1, num_steps)


@pytest.mark.parametrize(("pass_seconds", "num_steps"), [(0.001, 100), (0.3, 10**6), (20.0, 10**6)])
def test_timing_ends(taken, pass_seconds, num_steps):
    spent = 2 * pass_seconds * len(taken(pass_seconds, num_steps))
    assert spent < 20 or len(taken(pass_seconds, num_steps)) == 3


def test_masks_that_timing_draws_are_not_counted():
    """How many steps are timed depends on the clock; a run that begins then must draw the same masks."""
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 24}
    model = Transformer(ModelConfig(vocabulary_size=20, **shape))
    initialise(model, 0)
    adapt(model, Lora(rank=2, dropout=0.5))
    drawn = "blocks.0.attention.q_proj.adapters.default._extra_state"
    before = model.state_dict()[drawn].clone()
    with probe._at_rest(model, SimpleNamespace(optimizers=[], strategy=SimpleNamespace())):
        for _ in range(3):
            model(torch.arange(5)[None])
        assert not torch.equal(model.state_dict()[drawn], before)
    assert torch.equal(model.state_dict()[drawn], before)
