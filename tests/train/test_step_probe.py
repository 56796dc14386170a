"""What is timed before step 1, and for how long."""

from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penjing.base.files import write_json
from penjing.data.corpus import DataSettings
from penjing.devices.cpu import Cpu
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.lora import Lora, add_adapter
from penjing.model.transformer import Transformer
from penjing.objective.preference import Preference
from penjing.plan.flops import parameters, training_flops_per_token
from penjing.plan.run_estimate import ProbeTimings, RunEstimate
from penjing.plan.step_time import LinearFit
from penjing.plan.time_interval import ProbeNoise, time_interval
from penjing.plan.trainable import trainable_of
from penjing.train import step_probe, step_timing
from penjing.train.batch_geometry import BatchGeometry
from penjing.train.config import BatchSettings, CheckpointSettings, EvalSettings, Run, SampleSettings
from penjing.train.stages.base import DatasetSize


def test_a_forecast_is_kept_for_the_run_it_was_made_for(tmp_path):
    file = tmp_path / step_probe.FORECAST
    write_json(file, {"parameters": 10, "tokens": 1000, "predicted_loss_low": 1.0})
    for size, tokens, kept in ((10, 970, True), (10, 900, False), (11, 1000, False)):
        bill = SimpleNamespace(parameters=size, tokens=tokens)
        assert step_probe.predicted_loss(file, bill) == ({"predicted_loss_low": 1.0} if kept else {})


class Rows:
    def fresh(self):
        return self

    def state(self):
        return {}

    def position(self):
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
    strategy: Any = None
    meter: Any = None
    source: Any = None


CPU = SimpleNamespace(any=bool, world=1, rank=0, device=torch.device("cpu"))
READY = SimpleNamespace(runs_ahead=True, source=lambda units, rank, world: units)
SAMPLED = SimpleNamespace(runs_ahead=False)


@pytest.fixture
def taken(monkeypatch):
    """Steps as if each pass took so many seconds: `timed` gives the timings, and the passes of each step taken."""

    monkeypatch.setattr(step_timing, "LEAST_STEPS", 4)  # as outside of tests; see conftest.py
    monkeypatch.setattr(step_timing, "SHORT_RUN_SHARE", 0.5)

    def timed(stage, pass_seconds, num_steps, accumulate=2):
        steps = []

        def take(self):
            steps.append(self.passes)
            cold = 1.5 if len(steps) == 1 else 1.0
            passes = tuple([pass_seconds * cold] * self.passes) if self.times_passes else ()
            return step_timing.StepTiming(seconds=pass_seconds * cold * self.passes + 0.1 * pass_seconds, passes=passes)

        monkeypatch.setattr(step_timing.ProbeSteps, "take", take)
        parts = Parts(num_steps, accumulate, strategy=CPU, source=Rows())
        size = SimpleNamespace(round_steps=1, probe_steps=2)
        timings = step_timing._time_passes(stage, size, parts)
        full = [one.full_seconds(accumulate) for one in timings]
        assert full == pytest.approx([pass_seconds * (accumulate + 0.1)] * len(full))
        return steps

    return timed


def test_a_step_of_many_passes_is_estimated_from_two():
    timing = step_timing.StepTiming(seconds=3.0, data_wait=0.2, passes=(1.0, 1.5))
    assert timing.full_seconds(2) == 3.0
    assert timing.full_wait(10) == pytest.approx(1.0)
    assert timing.full_seconds(10) == pytest.approx(3.0 + 8 * (1.0 + 0.1)), "the last one alone talks to other ranks"
    whole = step_timing.StepTiming(seconds=3.0, data_wait=0.2)
    assert (whole.full_seconds(10), whole.full_wait(10)) == (3.0, 0.2)


def test_slow_steps_are_timed_once_and_never_whole(taken):
    assert taken(READY, 2.0, num_steps=100, accumulate=32) == [2, 2]  # the first gets warm
    assert taken(READY, 0.5, num_steps=10**6, accumulate=32) == [2] * 7


def test_quick_steps_are_taken_twice_and_timed_the_second_time(taken):
    steps = taken(READY, 0.1, num_steps=1000)
    assert steps == [2] * 2 * (1 + 19)  # twice four seconds


@pytest.mark.parametrize(("num_steps", "timed"), [(2, 4), (12, 6), (40, 20)])
def test_a_short_run_is_timed_for_few_steps(taken, num_steps, timed):
    assert taken(READY, 0.001, num_steps) == [2] * 2 * (1 + timed)


def test_of_answers_the_first_half_is_not_counted(taken):
    assert taken(SAMPLED, 0.001, num_steps=1000, accumulate=3) == [3] * (1 + 20)
    assert taken(SAMPLED, 20.0, num_steps=1000) == [2] * (1 + 2)


@pytest.mark.parametrize("pass_seconds", [0.003, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("num_steps", [100, 1000, 10**6])
def test_timing_takes_at_most_ten_seconds_or_a_twentieth_of_the_run(taken, pass_seconds, num_steps):
    run_seconds = 2.1 * pass_seconds * num_steps
    spent = 2.1 * pass_seconds * len(taken(READY, pass_seconds, num_steps))
    # Besides, where steps are quick, the two that wait for the first batch; and at least one step that is warm.
    assert spent <= max(1.0, min(10.0, 0.05 * run_seconds), 2 * 2.1 * pass_seconds) + 2 * 2.1 * pass_seconds


def test_where_a_pass_takes_long_fewer_rows_tell_of_many(monkeypatch):
    """Two seconds a row, 65 bytes a row: what the run's 64 rows take is on the line through those of few."""
    rows, peak = [], [0]

    def take(self):
        units = self.source.source
        rows.append(units)
        peak[0] = max(peak[0], 1000 + 65 * units)
        return step_timing.StepTiming(seconds=0.05 * units * self.passes + 1, passes=(0.05 * units,) * self.passes)

    monkeypatch.setattr(step_timing.ProbeSteps, "take", take)
    monkeypatch.setattr(Cpu, "peak_memory_bytes", lambda self, device: peak[0])
    geometry = BatchGeometry(global_size=128, micro_size=64, accumulation=2, world=1)
    meter = SimpleNamespace(peak_flops_per_second=1e9, flops_per_token=1e6)
    parts = Parts(1000, accumulate=2, strategy=CPU, meter=meter)
    size = SimpleNamespace(tokens_per_unit=500)
    few = step_timing._small_pass_units(size, parts, geometry)
    assert 1 <= few < 10 and step_timing._small_pass_units(size, parts, replace(geometry, micro_size=2)) == 2
    quick = SimpleNamespace(peak_flops_per_second=1e12, flops_per_token=1e6)
    assert step_timing._small_pass_units(size, replace(parts, meter=quick), geometry) == 64
    timings, held, few = step_timing._time_small_passes(READY, parts, geometry, 1)
    assert rows == [1, few, 2 * few, few] and few > 1
    assert held == 1000 + 65 * 64
    assert timings[0].full_seconds(2 * 64 / few) == pytest.approx(0.05 * 128 + 1)


def test_a_validation_that_takes_too_long_is_estimated():
    parts = SimpleNamespace(strategy=CPU, validate=lambda: {"val_loss": 3.0})
    size = SimpleNamespace(held_out_units=60)
    assert step_timing._time_validation(size, parts, unit_seconds=1.0, budget=5.0) == (pytest.approx(20.0), None)
    seconds, loss = step_timing._time_validation(size, parts, unit_seconds=0.01, budget=5.0)
    assert seconds < 1.0 and loss == 3.0


def test_masks_that_timing_draws_are_not_counted():
    """How many steps are timed depends on the clock; a run that begins then must draw the same masks."""
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
    }
    model = Transformer(ModelConfig(vocab_size=20, **shape))
    initialise(model, 0)
    add_adapter(model, Lora(rank=2, dropout=0.5))
    drawn = "blocks.0.attention.q_proj.adapters.default._extra_state"
    before = model.state_dict()[drawn].clone()
    with step_timing._state_restored(model, SimpleNamespace(optimizers=[], strategy=SimpleNamespace(scaler=None))):
        for _ in range(3):
            model(torch.arange(5)[None])
        assert not torch.equal(model.state_dict()[drawn], before)
    assert torch.equal(model.state_dict()[drawn], before)


def test_unrest_is_seen_in_passes_and_in_waiting_for_a_core(monkeypatch):
    monkeypatch.setattr(step_timing.host, "load_averages", lambda: ())
    monkeypatch.setattr(step_timing.host, "physical_cores", lambda: torch.get_num_threads() + 1)
    timings = [step_timing.StepTiming(seconds=3.0, data_wait=0.4, threads={"1": (2.0, 0.6)}, passes=(1.0, 1.5))] * 2
    noise = step_timing._noise(CPU, timings)
    assert (noise.num_timed, noise.slowdown, noise.crowding) == (4, pytest.approx(1.3), 1.0)
    assert noise.spread == pytest.approx(0.25 / 1.25)
    assert not noise.all_cores
    monkeypatch.setattr(step_timing.host, "physical_cores", torch.get_num_threads)
    assert step_timing._noise(CPU, timings).all_cores
    assert not step_timing._noise(SimpleNamespace(world=1, device=torch.device("cuda")), timings).all_cores


def test_a_bill_by_hand():
    run = Run(
        model=ModelConfig(hidden_size=64, num_hidden_layers=2, vocab_size=300),
        data=DataSettings(seq_len=16),
        batch=BatchSettings(size=4),
        eval=EvalSettings(every=13),
        checkpoint=CheckpointSettings(every=7),
        sample=SampleSettings(every=4),
    )
    size = DatasetSize(
        unit="rows", units_per_epoch=50, tokens_per_unit=16.0, seq_len=16, num_keys=9.0, padding_fraction=0.0
    )
    counts = trainable_of(Transformer(run.model), run.model)
    bill = step_probe.estimate_run(
        run,
        size,
        counts,
        25,
        ProbeTimings(
            step_seconds=2.0,
            wait_seconds=0.5,
            validation_seconds=3.0,
            checkpoint_seconds=1.0,
            last_checkpoint_seconds=3.0,
            sample_seconds=0.25,
            startup_seconds=9.0,
            noise=ProbeNoise(spread=0.4, num_timed=16),
            line=LinearFit(0.5, 0.75),
            peak_memory_bytes=700,
        ),
        errors=[0.3],
    )
    assert bill.tokens_per_step == 64
    assert bill.tokens == 1600
    assert bill.tokens_per_epoch == 800
    assert bill.epochs == 2.0
    assert bill.predicted_seconds == 25 * 2 + 2 * 3 + (3 * 1 + 3) + 7 * 0.25 == 63.75
    assert bill.parts_seconds == {"training": 50, "validation": 6, "checkpoint": 6, "sample": 1.75}
    assert bill.step_parts_seconds == {"compute": 1.5, "data_wait": 0.5}
    interval = time_interval(63.75, ProbeNoise(spread=0.4, num_timed=16), [0.3])
    assert (bill.predicted_seconds_low, bill.predicted_seconds_high) == interval
    assert (bill.probe["fixed_seconds"], bill.probe["pass_seconds"], bill.probe["spread"]) == (0.5, 0.75, 0.4)
    assert bill.tokens_per_second == 32
    assert bill.flops == 1600 * training_flops_per_token(run.model, 9.0)
    assert bill.predicted_peak_memory_bytes == 700
    assert bill.parameters == parameters(run.model).total
    assert bill.level == "L2"
    assert RunEstimate.from_dict(asdict(bill)) == bill


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"every": 13}, 2), ({"every": 25}, 1), ({"every": 0}, 1), ({"every": 13, "at_start": True}, 3)],
)
def test_every_validation_is_planned(settings, expected):
    """Always one at the end, also without `every`; one more before step 1 with `at_start`."""
    assert EvalSettings(**settings).validations(25) == expected


def test_pairs_meet_shapes_that_timing_did_not():
    size = DatasetSize(
        unit="pairs", units_per_epoch=50, tokens_per_unit=16.0, seq_len=16, num_keys=9.0, padding_fraction=0.0
    )
    pairs, rows = Run(objective=Preference(loss="orpo")), Run()
    late = {
        (run.objective.name, ahead, rounds): step_timing._late_shapes(
            SimpleNamespace(run=run, runs_ahead=ahead), size, rounds
        )
        for run, ahead, rounds in ((pairs, True, 20), (rows, True, 2), (pairs, False, 2), (pairs, False, 3))
    }
    assert list(late.values()) == [True, False, True, False]
