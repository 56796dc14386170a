"""Prediction against outcome, the history of errors, and the meter that sees lateness while it happens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penjing.plan import prediction_history as ledger
from penjing.track.console import describe
from penjing.train.throughput import Meter, Refit

PLAN = {
    "steps": 100,
    "tokens": 1000,
    "predicted_seconds": 110.0,
    "predicted_seconds_low": 100.0,
    "predicted_seconds_high": 120.0,
    "parts_seconds": {"training": 100.0, "validation": 8.0, "checkpoint": 2.0, "sample": 0.0},
    "step_seconds": 1.0,
    "step_parts_seconds": {"compute": 0.9, "data_wait": 0.1},
    "startup_seconds": 5.0,
    "predicted_peak_memory_bytes": 2**30,
    "tokens_per_second": 10.0,
    "level": "L2",
    "machine": "1 x box",
    "versions": {"torch": "2.13"},
}
OUTCOME = {
    "seconds": 100.0,
    "training_seconds": 92.0,
    "validation_seconds": 6.0,
    "checkpoint_seconds": 2.0,
    "sample_seconds": 0.0,
    "data_wait_seconds": 20.0,
    "this_process_seconds": 106.0,
    "peak_memory_bytes": 2**30 * 1.25,
    "tokens": 1000,
    "tokens_per_second": 10.87,
    "refit_seconds": 98.0,
    "resumed": 0,
}


def test_terms_by_hand():
    terms = {term.name.strip(): term for term in ledger.compare(PLAN, OUTCOME)}
    assert terms["time"].error == pytest.approx(0.10)
    assert terms["training"].error == pytest.approx(100 / 92 - 1)
    assert terms["validation"].error == pytest.approx(8 / 6 - 1)
    assert terms["checkpoint"].error == 0
    assert "sample" not in terms  # nothing was planned and nothing came
    assert terms["waiting for data"].predicted == pytest.approx(10.0)
    assert terms["peak memory"].error == pytest.approx(-0.2)
    assert terms["time, re-fit (L3)"].error == pytest.approx(-0.02)
    assert terms["wall, start-up with it"].error == pytest.approx(115 / 106 - 1)


def test_a_run_that_stopped_is_held_against_its_share():
    stopped = {**OUTCOME, "steps_done": 25, "seconds": 27.5, "ended": "out of memory", "refit_seconds": 98.0}
    terms = {term.name.strip(): term for term in ledger.compare(PLAN, stopped)}
    assert terms["time"].error == 0
    assert "time, re-fit (L3)" not in terms
    one = ledger.entry("runs/x", "2026-01-01T00:00:00Z", PLAN, stopped)
    assert (one.ended, one.in_interval) == ("out of memory", True)


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENJING_HOME", str(tmp_path))
    return tmp_path


def test_the_ledger_only_grows(own_home):
    one = ledger.entry("runs/x", "2026-01-01T00:00:00Z", PLAN, OUTCOME)
    ledger.append(one)
    ledger.append(replace(one, run="runs/\udcff"))  # a folder whose name is no UTF-8
    (own_home / "ledger.jsonl").open("a").write('{"from": "another version"}\nbroken\n')
    ledger.append(one)
    assert [each.run for each in ledger.read_history()] == ["runs/x", "runs/\udcff", "runs/x"]
    assert ledger.read_history()[0] == one
    assert one.time_error == pytest.approx(0.1) and one.in_interval


def test_drift_is_told_after_five_bad_plans_of_one_machine():
    one = ledger.entry("runs/x", "2026-01-01T00:00:00Z", PLAN, OUTCOME)
    good = replace(one, time_error=0.01)
    bad = replace(one, time_error=-0.08, torch="2.14")
    assert ledger.recent_bias([bad] * 4, "1 x box") == ""
    assert ledger.recent_bias([good] * 20, "1 x box") == ""
    assert ledger.recent_bias([bad] * 9 + [good] * 3, "1 x box") == "", "only the newest five count"
    assert ledger.recent_bias([bad] * 9, "another box") == ""
    note = ledger.recent_bias([good] * 5 + [bad] * 5, "1 x box")
    assert "8% off, too short" in note and "2.13, 2.14" in note and "penjing plan profile" in note
    assert ledger.recent_bias([replace(bad, ended="stopped")] * 9, "1 x box") == ""


def test_errors_of_the_runs_that_ended_on_a_machine():
    one = ledger.entry("runs/x", "2026-01-01T00:00:00Z", PLAN, OUTCOME)
    runs = [one, replace(one, time_error=-0.5), replace(one, machine="2 x box"), replace(one, ended="stopped")]
    assert ledger.log_errors(runs, "1 x box") == pytest.approx([math.log(100 / 110), math.log(2)])
    assert ledger.log_errors(runs, "another box") == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def planned(steps: int, wait_seconds: float = 0.0, other_seconds: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(steps=steps, step_seconds=1.0, wait_seconds=wait_seconds, other_seconds=other_seconds)


def steps(meter: Meter, clock: Clock, count: int, wait: float, compute: float) -> None:
    for _ in range(count):
        with meter.step(world=1):
            with meter.waiting_for_data():
                clock.now += wait
            clock.now += compute
            meter.count(10)


def test_the_meter_fits_the_plan_again_once_and_early():
    clock = Clock()
    meter = Meter(1.0, None, clock=clock, expected=planned(500, other_seconds=50.0))
    steps(meter, clock, 9, 0.0, 2.0)
    assert meter.refit is None
    steps(meter, clock, 1, 0.0, 2.0)
    assert meter.refit == Refit(10, 2.0 * 500 + 50.0)
    steps(meter, clock, 90, 0.0, 1.0)
    assert meter.refit == Refit(10, 1050.0)
    again = Meter(1.0, None)
    again.restore(json.loads(json.dumps(meter.state())))
    assert again.refit == meter.refit and again.steps == 100
    totals = meter.totals()
    assert (totals["refit_step"], totals["refit_seconds"]) == (10, 1050.0)


def test_a_late_step_says_what_it_waits_for():
    clock = Clock()
    meter = Meter(1.0, None, clock=clock, expected=planned(100, wait_seconds=0.1))
    steps(meter, clock, 4, 0.1, 0.9)
    assert "slower" not in describe(meter.interval(96))
    steps(meter, clock, 4, 0.5, 0.9)
    figures = meter.interval(92)
    assert figures["seconds_over_plan"] == pytest.approx(1.4)
    assert figures["wait_over_plan"] == pytest.approx(0.4)
    assert "40% slower than planned: waits for data" in describe(figures)
    steps(meter, clock, 4, 0.1, 1.4)
    assert "50% slower than planned: computation" in describe(meter.interval(88))


def test_both_utilisations_have_their_names():
    clock = Clock()
    meter = Meter(5.0, 100.0, clock=clock, flops_per_token_full_square=8.0)
    steps(meter, clock, 1, 0.0, 1.0)
    figures = meter.interval(0)
    assert (figures["mfu"], figures["mfu_full_square"]) == (0.5, 0.8)
    assert meter.totals()["mfu_full_square"] == pytest.approx(0.8)
    assert "MFU 50% causal" in describe(figures)
