"""The meter against a case worked out by hand, with a clock that is told the time."""

from types import SimpleNamespace

import pytest

from penjing.train.throughput import Meter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_speed_utilisation_and_shares():
    clock = Clock()
    others = 4 * 300  # the other rank's tokens in four steps
    meter = Meter(flops_per_token=6e6, peak_flops_per_second=1e10, clock=clock, sum_ranks=lambda count: count + others)
    for _ in range(4):
        with meter.step(world=2):
            with meter.waiting_for_data():
                clock.now += 0.5
            clock.now += 1.5
            meter.count(500)  # on this rank: 800 on both
    # 3,200 tokens in 8 s: 400/s, 400 * 6e6 / 2e10 = 12 % of both peaks; 10 steps of 2 s are left
    figures = meter.interval(steps_left=10)
    assert figures == {
        "tokens": 3200,
        "seconds": 8.0,
        "tokens_per_second": 400.0,
        "seconds_left": 20.0,
        "mfu": pytest.approx(0.12),
    }
    with meter.share("validation"):
        clock.now += 3
    with meter.share("checkpoint"):
        clock.now += 1
    totals = meter.totals()
    assert totals["training_seconds"] == 8.0
    assert totals["validation_seconds"] == 3.0
    assert totals["checkpoint_seconds"] == 1.0
    assert totals["data_wait_seconds"] == 2.0
    assert totals["tokens_per_second"] == 400.0  # of training time: validation does not slow it
    assert totals["mfu"] == pytest.approx(0.12)
    assert meter.total_seconds == 12.0


def test_an_interval_starts_where_the_last_one_ended():
    clock = Clock()
    meter = Meter(flops_per_token=1.0, peak_flops_per_second=None, clock=clock)
    for seconds, tokens in ((1.0, 100), (4.0, 100)):
        with meter.step(world=1):
            clock.now += seconds
            meter.count(tokens)
        figures = meter.interval(steps_left=0)
    assert figures["tokens_per_second"] == 25.0
    assert "mfu" not in figures
    assert meter.interval(steps_left=0) == {}


def test_a_restored_meter_goes_on_counting():
    clock = Clock()
    first = Meter(flops_per_token=1.0, peak_flops_per_second=None, clock=clock)
    with first.step(world=1):
        clock.now += 2
        first.count(10)
    second = Meter(flops_per_token=1.0, peak_flops_per_second=None, clock=clock)
    second.restore(first.state())
    with second.step(world=1):
        clock.now += 3
        second.count(40)
    assert second.totals()["tokens"] == 50
    assert second.totals()["tokens_per_second"] == 10.0


def test_how_long_a_step_may_take_is_known_from_the_run_and_its_plan():
    clock = Clock()

    def take(meter, seconds):
        with meter.step(world=1):
            clock.now += seconds
        return meter.longest_seconds

    meter = Meter(
        1.0, None, clock=clock, expected=SimpleNamespace(steps=9, step_seconds=3.0, wait_seconds=0.0, other_seconds=0.0)
    )
    assert meter.longest_seconds == 0.0  # the first one compiles
    assert [take(meter, seconds) for seconds in (2, 5, 1)] == [3.0, 5.0, 5.0]
    again = Meter(1.0, None, clock=clock)
    again.restore(meter.state())
    assert again.longest_seconds == 0.0
    assert take(again, 1) == 5.0  # in the middle of a round of sampling, the slow steps are those before
