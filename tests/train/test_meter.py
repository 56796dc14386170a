"""The meter against a case worked out by hand, with a clock that is told the time."""

import pytest

from penjing.train.meter import Meter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_speed_utilisation_and_shares():
    clock = Clock()
    meter = Meter(flops_per_token=6e6, peak_flops_per_second=1e10, clock=clock)
    for _ in range(4):
        with meter.step(world=2) as counted:
            with meter.waiting_for_data():
                clock.now += 0.5
            clock.now += 1.5
            counted.tokens = 500  # on this rank: 1,000 on both
    # 4,000 tokens in 8 s: 500/s, 500 * 6e6 / 1e10 = 30 % of peak; 10 steps of 2 s are left
    figures = meter.interval(steps_left=10)
    assert figures == {
        "tokens": 4000,
        "seconds": 8.0,
        "tokens_per_second": 500.0,
        "seconds_left": 20.0,
        "mfu": pytest.approx(0.3),
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
    assert totals["tokens_per_second"] == 500.0  # of training time: validation does not slow it
    assert meter.total_seconds == 12.0


def test_an_interval_starts_where_the_last_one_ended():
    clock = Clock()
    meter = Meter(flops_per_token=1.0, peak_flops_per_second=None, clock=clock)
    for seconds, tokens in ((1.0, 100), (4.0, 100)):
        with meter.step(world=1) as counted:
            clock.now += seconds
            counted.tokens = tokens
        figures = meter.interval(steps_left=0)
    assert figures["tokens_per_second"] == 25.0
    assert "mfu" not in figures
    assert meter.interval(steps_left=0) == {}


def test_a_restored_meter_goes_on_counting():
    clock = Clock()
    first = Meter(flops_per_token=1.0, peak_flops_per_second=None, clock=clock)
    with first.step(world=1) as counted:
        clock.now += 2
        counted.tokens = 10
    second = Meter(flops_per_token=1.0, peak_flops_per_second=None, clock=clock)
    second.restore(first.state())
    with second.step(world=1) as counted:
        clock.now += 3
        counted.tokens = 40
    assert second.totals()["tokens"] == 50
    assert second.totals()["tokens_per_second"] == 10.0
