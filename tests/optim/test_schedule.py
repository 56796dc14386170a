"""Learning-rate schedules against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from penjing.base.errors import UserError
from penjing.optim.schedule import Constant, Cosine, WarmupStableDecay


def curve(schedule, num_steps):
    return [schedule.factor(step, num_steps) for step in range(num_steps)]


def test_cosine():
    schedule = Cosine(warmup_ratio=0.2, min_lr_ratio=0.1)
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, 1.0]  # two steps of warm-up, then the peak
    found = curve(schedule, 10)
    assert found[:3] == pytest.approx(expected)
    assert found[4] == pytest.approx(0.1 + 0.9 * (1 + half) / 2)  # a quarter of the way: cos 45 degrees
    assert found[6] == pytest.approx(0.55)
    assert found[8] == pytest.approx(0.1 + 0.9 * (1 - half) / 2)
    assert schedule.factor(10, 10) == pytest.approx(0.1)
    assert schedule.factor(99, 10) == pytest.approx(0.1)


def test_warmup_stable_decay():
    schedule = WarmupStableDecay(warmup_ratio=0.2, decay_ratio=0.4, min_lr_ratio=0.2)
    assert curve(schedule, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    assert schedule.factor(10, 10) == pytest.approx(0.2)
    no_decay = WarmupStableDecay(warmup_ratio=0, decay_ratio=0)
    assert curve(no_decay, 4) == [1, 1, 1, 1]


def test_constant():
    assert curve(Constant(warmup_ratio=0.4), 5) == [0.5, 1, 1, 1, 1]
    assert curve(Constant(), 3) == [1, 1, 1]


@pytest.mark.parametrize("schedule", [Cosine(), WarmupStableDecay(), Constant(warmup_ratio=0.3)])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 500])
def test_every_step_has_a_rate(schedule, num_steps):
    assert all(0 < factor <= 1 for factor in curve(schedule, num_steps))


def test_default_floors_are_reached():
    assert Cosine().factor(499, 500) == pytest.approx(0.1, abs=1e-4)
    assert WarmupStableDecay().factor(499, 500) == pytest.approx(1 / 250)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Cosine(warmup_ratio=1.5), "schedule.warmup_ratio: out of range; got 1.5"),
        (lambda: Cosine(min_lr_ratio=-0.1), "schedule.min_lr_ratio: out of range; got -0.1"),
        (lambda: Constant(warmup_ratio=2), "schedule.warmup_ratio"),
        (lambda: WarmupStableDecay(decay_ratio=3), "schedule.decay_ratio"),
        (lambda: WarmupStableDecay(warmup_ratio=0.6, decay_ratio=0.6), "warm-up and decay overlap; got 0.6"),
    ],
)
def test_bad_settings_are_refused(make, line):
    with pytest.raises(UserError) as caught:
        make()
    assert line in str(caught.value)
