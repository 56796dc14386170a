"""The timer by a clock of its own, figures by hand, and a spec that survives its file."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from compare.figures import figures
from compare.held_out import IGNORED, bits_per_byte
from compare.trial_spec import AlignmentSpec, read_spec
from compare.trial_timer import TrialTimer
from steps import timer as timing
from steps.timer import time_steps

from penjing.base.process_info import peak_resident_bytes


class TimerCallback:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_step_lasts_from_the_end_of_the_one_before(alignment_spec):
    clock, cpu = TimerCallback(), TimerCallback()
    timer = TrialTimer(alignment_spec, age=clock, cpu_clock=cpu)
    clock.now = 10.0
    timer.ready()
    going = []
    for seconds, used, loss in ((1.0, 0.5, 0.3), (2.0, 1.5, 0.2), (0.5, 0.25, 0.1)):
        clock.now, cpu.now = clock.now + seconds, cpu.now + used
        going.append(timer.step(4, loss=loss))
    assert going == [True, True, False]
    result = timer.result(options=["plain"])
    assert result["startup_seconds"] == 10.0
    assert result["step_seconds"] == [1.0, 2.0, 0.5]
    assert result["step_cpu_seconds"] == [0.5, 1.5, 0.25]
    assert result["step_units"] == [4, 4, 4]
    assert [each["loss"] for each in result["figures"]] == [0.3, 0.2, 0.1]
    assert result["curve"] == []


def test_evaluations_are_not_training_time(spec):
    clock, bits = TimerCallback(), iter([8.0, 3.0, 2.0])

    def evaluate():
        clock.now += 100.0
        return next(bits)

    timer = TrialTimer(spec, evaluate, age=clock, cpu_clock=clock)
    clock.now = 5.0
    timer.ready()
    going = []
    for seconds in (4.0, 3.0, 3.0, 2.0, 2.0):
        clock.now += seconds
        going.append(timer.step(10))
    assert going == [True, True, True, True, False]
    assert timer.step_seconds == pytest.approx([4.0, 3.0, 3.0, 2.0, 2.0])
    assert [round(point["seconds"], 6) for point in timer.curve] == [5.0, 15.0, 19.0]
    assert [point["tokens"] for point in timer.curve] == [0, 30, 50]
    assert timer.result()["startup_seconds"] == 5.0


@pytest.mark.parametrize(("setting", "waits"), [("path", [0, 1, 2, 4, 6]), ("step", [0, 1, 2, 8])])
def test_a_gpus_queue_is_waited_for_where_a_count_begins_or_ends(spec, setting, waits, monkeypatch):
    """0: before the first step. The path is evaluated 2.5 s after its first step and ends after 5."""
    clock, done, seen = TimerCallback(), [0], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append(done[0]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 1000 + done[0])
    spec = replace(spec, setting=setting, device="cuda", warmup=2, seconds=5.0, evaluations=2, steps=8)
    timer = TrialTimer(spec, lambda: 1.0, age=clock, cpu_clock=clock)
    timer.ready()
    going = True
    while going:
        done[0] += 1
        clock.now += 1.0
        going = timer.step(5)
    assert seen == waits
    assert timer.result()["peak_bytes"] == 1000 + (4 if setting == "path" else 8)


def test_steps_are_timed_in_lots_after_warm_up_and_no_longer_than_asked(monkeypatch):
    clock, taken, cpu = TimerCallback(), [], torch.device("cpu")
    monkeypatch.setattr(timing.time, "perf_counter", clock)

    def step(number):
        taken.append(number)
        clock.now += 10.0 if number < 2 else 1.0

    assert time_steps(step, cpu, steps=4, warmup=2, group_size=2) == [1.0, 1.0]
    assert taken == [0, 1, 2, 3, 4, 5]
    assert len(time_steps(step, cpu, steps=9, warmup=2, seconds=0.5)) == 2


def test_a_rate_leaves_the_warm_up_out():
    """Four pairs a step: 100 s of compiling, then 2 s and 4 s."""
    trial = {"step_seconds": [100.0, 2.0, 4.0], "step_cpu_seconds": [100.0, 1.0, 1.0], "step_units": [4, 4, 4]}
    steps = [{"loss": 9.0, "reward": 9.0}, {"loss": 0.7, "reward": 0.0}, {"loss": 0.6, "reward": 1.0}]
    found = figures({**trial, "figures": steps, "peak_bytes": 9, "peak_bytes_after_imports": 4}, 1)
    assert found["units_per_second"] == pytest.approx(8 / 6)
    assert (found["seconds_per_step"], found["cpu_seconds_per_step"], found["training_seconds"]) == (3.0, 1.0, 106.0)
    assert found["first_step_seconds"] == 97.0  # beyond a usual step
    assert (found["peak_bytes"], found["peak_bytes_beyond_imports"]) == (9.0, 5.0)
    assert (found["last_loss"], found["mean_reward"]) == (0.6, 0.5)


def test_peak_is_that_of_this_process():
    before = peak_resident_bytes()
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_resident_bytes() >= before
    assert peak_resident_bytes() > len(block)


def test_a_spec_is_read_back_as_it_was(alignment_spec, tmp_path, monkeypatch):
    (tmp_path / "spec.json").write_text(json.dumps(asdict(alignment_spec)))
    monkeypatch.setattr("sys.argv", ["trial", str(tmp_path / "spec.json")])
    assert read_spec(AlignmentSpec) == alignment_spec


def test_bits_per_byte_counts_each_target_once(tmp_path):
    target_BT = np.full((3, 5), IGNORED)
    target_BT[0, :5], target_BT[1, :2], target_BT[2, :1] = 1, 1, 1
    np.savez(tmp_path / "h.npz", ids_BT=np.zeros((3, 5), dtype=np.int64), target_BT=target_BT, num_bytes=16)
    seen = []

    def nats(ids_BT, target_BT):
        seen.append(target_BT.shape)
        return float((target_BT != IGNORED).sum()) * np.log(2)

    assert bits_per_byte(str(tmp_path / "h.npz"), nats, rows=2) == pytest.approx(8 / 16)
    assert seen == [(2, 5), (1, 1)]
