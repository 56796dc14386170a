"""The interval of a predicted time: by hand, and how often it holds on simulated machines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from penjing.plan.time_interval import ProbeNoise, crowding, slowdown, time_interval

QUIET = ProbeNoise(spread=0.02, num_timed=10)
Run = tuple[ProbeNoise, float]  # what the probe saw, and log(actual / predicted) of the run
Machine = Callable[[random.Random], Callable[[int], Run]]


def test_deviation_by_hand() -> None:
    level = 0.03 / 1.2816
    assert ProbeNoise().deviation == pytest.approx(level, rel=1e-4)
    spread = ProbeNoise(spread=0.1, num_timed=4)
    assert spread.deviation == pytest.approx(math.hypot(level, 0.1 / 1.2816 * math.sqrt(0.4 + 0.25)), rel=1e-4)
    busy = ProbeNoise(slowdown=2.0, crowding=3.0)
    assert busy.deviation == pytest.approx(math.hypot(level, 0.4 * math.log(3)), rel=1e-4)
    assert ProbeNoise(slowdown=2.0).deviation == pytest.approx(math.hypot(level, 0.4 * math.log(2)), rel=1e-4)
    assert ProbeNoise(slowdown=0.9, crowding=0.5).deviation == ProbeNoise().deviation
    full = ProbeNoise(all_cores=True)
    assert (full.probe_deviation, full.deviation) == (
        ProbeNoise().probe_deviation,
        pytest.approx(math.hypot(level, 0.1), rel=1e-4),
    )


def test_a_long_wait_that_the_load_does_not_explain_is_half_chance() -> None:
    assert ProbeNoise(slowdown=8.0, crowding=2.0).lasting_slowdown == pytest.approx(4.0)
    assert ProbeNoise(slowdown=1.5, crowding=2.0).lasting_slowdown == 1.5
    assert ProbeNoise(slowdown=8.0).lasting_slowdown == 8.0, "no load average is known"


def test_the_thread_that_waited_longest_for_a_core_holds_up_the_step() -> None:
    steps = [{"main": (1.0, 0.0), "worker": (0.5, 0.5)}, {"main": (1.0, 0.2), "worker": (1.0, 0.0)}]
    assert slowdown(steps) == pytest.approx(2.0 / 1.5)
    assert slowdown([{"main": (1.0, 0.1), "reader": (0.1, 0.3)}]) == pytest.approx(1.1), "readers wait, steps do not"
    assert slowdown([{}]) == slowdown([]) == slowdown([{"main": (0.0, 0.0)}]) == 1.0, "no system tells"


def test_load_averages_of_others_only() -> None:
    assert crowding((1.9, 1.5, 0.2), threads=2, cores=2) == 1.0, "our own threads"
    assert crowding((4.0, 1.0, 1.0), threads=1, cores=2) == pytest.approx(2.0)
    assert crowding((900.0,), threads=1, cores=2) == 3.0, "no load average is believed further"
    assert crowding((), threads=1, cores=2) == 1.0


def test_an_interval_holds_the_prediction_and_reaches_where_plans_missed() -> None:
    low, high = time_interval(100.0, QUIET, [])
    assert 93 < low < 97 and 103 < high < 107
    assert low * high == pytest.approx(100.0**2), "as far down as up"
    short = time_interval(100.0, QUIET, [0.2] * 10)  # everything took 22 % longer
    assert short[0] <= 100 and short[1] > 122
    narrow = time_interval(100.0, QUIET, [0.01, -0.01] * 10)
    assert low < narrow[0] < 97.5 and 102.5 < narrow[1] < high
    one_in_ten = time_interval(100.0, QUIET, [0.0] * 8 + [0.5])
    assert one_in_ten[1] >= 100 * math.exp(0.5), "of nine runs the next one may be the worst"
    assert time_interval(100.0, QUIET, [3.0] + [0.01, -0.01] * 10) == narrow, "only the newest twenty count"


def test_two_runs_that_missed_widen_a_quiet_probes_interval() -> None:
    """By Student's t of four degrees, 1.533 in every table: the probe counts for two runs, and two missed by 0.3. Their
    mean over four is off itself, by two sixteenths of their variance."""
    level = 0.03 / 1.2816
    half = 1.533 * math.sqrt((2 * level**2 + 2 * 0.3**2) / 4 * (1 + 2 / 16))
    interval = time_interval(100.0, ProbeNoise(), [0.3, -0.3])
    assert interval == pytest.approx((100 * math.exp(-half), 100 * math.exp(half)), rel=0.005)


def test_runs_that_came_as_planned_overrule_the_doubt_of_a_machine_without_a_spare_core() -> None:
    full = ProbeNoise(spread=0.02, num_timed=10, all_cores=True)
    widths = [high - low for low, high in (time_interval(1.0, full, [0.01, -0.01] * count) for count in (0, 2, 10))]
    quiet = [high - low for low, high in (time_interval(1.0, QUIET, [0.01, -0.01] * count) for count in (0, 2, 10))]
    assert widths[0] > 2.5 * quiet[0] and widths[0] > 1.5 * widths[1] and widths[2] < 1.5 * quiet[2]


def seen(probe: list[float], run: list[float], crowd: float = 1.0) -> Run:
    mean = sum(probe) / len(probe)
    noise = ProbeNoise(
        spread=(max(probe) - min(probe)) / 2 / mean, num_timed=len(probe), slowdown=max(1.0, mean), crowding=crowd
    )
    predicted = mean * noise.lasting_slowdown / noise.slowdown
    return noise, math.log(sum(run) / len(run) / predicted)


def quiet(rng: random.Random) -> Callable[[int], Run]:
    return lambda index: (QUIET, rng.gauss(0, 0.02))


def biased(rng: random.Random) -> Callable[[int], Run]:
    return lambda index: (QUIET, rng.gauss(0.1, 0.04))


def heavy_tails(rng: random.Random) -> Callable[[int], Run]:
    def run(index: int) -> Run:
        return QUIET, 0.03 * rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(3)) / 3)

    return run


def two_speeds(rng: random.Random) -> Callable[[int], Run]:
    return lambda index: (QUIET, rng.gauss(0.4 if rng.random() < 0.3 else 0.0, 0.02))


def shared(rng: random.Random, others: int = 2, cores: int = 2) -> Callable[[int], Run]:
    """Others come and go, some minutes each; a probe sees three moments, a run twenty."""
    working = [rng.random() < 0.5 for _ in range(others)]

    def moment() -> float:
        for each in range(others):
            working[each] ^= rng.random() < 0.06
        return max(1.0, (1 + sum(working)) / cores) * math.exp(rng.gauss(0, 0.03))

    def run(index: int) -> Run:
        for _ in range(40):
            moment()
        crowd = crowding((1 + sum(working),), threads=1, cores=cores)
        return seen([moment() for _ in range(3)], [moment() for _ in range(20)], crowd)

    return run


def crowded(rng: random.Random) -> Callable[[int], Run]:
    return shared(rng, others=4)


def drifts(rng: random.Random) -> Callable[[int], Run]:
    """Two threads on two virtual cores: the speed wanders within +-10 % over minutes, of which a probe sees nothing.

    A moment has 5 s. A run takes 20 s to 5 min; half a minute to five lie between two.
    """
    speed, persistence = [rng.gauss(0, 0.08)], math.exp(-5 / 60)

    def moments(least: int, most: int) -> list[float]:
        passed = []
        for _ in range(rng.randint(least, most)):
            speed[0] = persistence * speed[0] + math.sqrt(1 - persistence**2) * rng.gauss(0, 0.08)
            passed.append(math.exp(speed[0]))
        return passed

    def run(index: int) -> Run:
        moments(6, 60)
        noise = ProbeNoise(spread=abs(rng.gauss(0.02, 0.01)), num_timed=14, all_cores=True)
        (probe,), lasting = moments(1, 1), moments(4, 60)
        return noise, math.log(sum(lasting) / len(lasting) / probe) + rng.gauss(0, 0.01)

    return run


def becomes_busy(rng: random.Random) -> Callable[[int], Run]:
    before, after = quiet(rng), shared(rng)
    return lambda index: before(index) if index < 15 else after(index)


@pytest.mark.parametrize("machine", [quiet, biased, heavy_tails, two_speeds, shared, crowded, drifts, becomes_busy])
def test_four_of_five_runs_fall_inside(machine: Machine) -> None:
    rng, inside, early, widths, runs, machines = random.Random(0), 0, 0, [], 30, 60
    for _ in range(machines):
        errors: list[float] = []
        run = machine(rng)
        for index in range(runs):
            noise, error = run(index)
            low, high = time_interval(1.0, noise, errors)
            inside += low <= math.exp(error) <= high
            early += index < 5 and low <= math.exp(error) <= high
            widths.append(high - low)
            errors.append(error)
    assert inside / (runs * machines) >= 0.8
    if machine in (quiet, drifts):  # what a probe can know of; the others have to be learnt
        assert early / (5 * machines) >= 0.8
    middle = sorted(widths)[len(widths) // 2] / 2
    # Half-widths: a quiet machine's plans are still sharp, and no interval says nothing.
    assert middle < {"quiet": 0.05, "biased": 0.15, "heavy_tails": 0.12, "drifts": 0.2}.get(machine.__name__, 0.7)
