"""How sure a predicted time is: the interval that should hold four of five runs, on this machine as it is now.

Errors are logarithms of actual / predicted, so that twice as long and half as long are equally far off. Three things
say how large they may be: what the probe saw (its own spread, how busy the machine was meanwhile), how unsteady
machines like this one are, and how far off the newest plans on this machine were. What the probe saw always counts;
the second is a guess, which the third overrules run by run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from penjing.plan.device_model import MARGINS

NORMAL_90 = NormalDist().inv_cdf(0.9)  # of a normal distribution, four of five lie within so many deviations
NEWEST = 20  # runs of the history that are looked at
PROBE_WEIGHT = 2  # of how many runs the probe's own deviation counts for among them
ENOUGH = 4  # runs from which on their own quantiles, whatever their distribution, must lie inside
# Of a timing's variance, what a mean over many does not lose: neighbours stay for longer than a probe takes. In five
# series the mean of one second was off that of the next fifteen by 0.2 to 1.4 of this variance, 0.4 in the median.
LASTING_SHARE = 0.4
# Standard deviation where our threads take every core: all wait for the slowest one, whatever else wants a core delays
# it, and virtual cores share physical ones. Plans for two threads on two virtual cores were off by 3 to 11 % (root mean
# square of ten runs each), of which probes of a second saw little; those for one thread by 1 to 2 %.
ALL_CORES = 0.1
MAX_CROWDING = 3.0  # believed of a load average, which also counts who waits for a disk
BUSY_SHARE = 0.4  # of log(slowdown): neighbours may leave, or come, at some time in the run


@dataclass(frozen=True, kw_only=True)
class ProbeNoise:
    """What a probe saw of the machine's unrest."""

    spread: float = 0.0  # half of what four of five timings lie within, over their mean
    num_timed: int = 1
    slowdown: float = 1.0  # what waiting for a core did to the slowest thread; 1 = none waited
    crowding: float = 1.0  # slowdown to expect if all that the load average counts computed at once; 1 = none
    all_cores: bool = False  # whether our own threads take every core

    @property
    def lasting_slowdown(self) -> float:
        """The slowdown to expect of the whole run. A probe is short: where it waited for longer than the load average
        explains, half of that (of its logarithm) is taken for chance."""
        if 1.0 < self.crowding < self.slowdown:
            return math.sqrt(self.slowdown * self.crowding)
        return self.slowdown

    @property
    def seen(self) -> float:
        """Standard deviation of log(actual / predicted) by what the probe saw."""
        timing = (self.spread / NORMAL_90) ** 2 * (LASTING_SHARE + 1 / max(1, self.num_timed))
        busy = BUSY_SHARE * math.log(max(1.0, self.lasting_slowdown, self.crowding))
        return math.sqrt((MARGINS["L2"] / NORMAL_90) ** 2 + timing + busy**2)

    @property
    def deviation(self) -> float:
        """Standard deviation to expect of log(actual / predicted), before any run on this machine is known."""
        return math.hypot(self.seen, ALL_CORES if self.all_cores else 0.0)


def slowdown(steps: Iterable[Mapping[str, tuple[float, float]]]) -> float:
    """How many times as long the slowest thread took because it waited for a core; 1 where none did.

    steps: of each, the seconds that every thread had a core, and that it waited for one. Threads that want a core for
    less than half as long as the busiest one, such as readers of data, do not count.
    """
    totals: dict[str, tuple[float, float]] = {}
    for threads in steps:
        for name, (had, waited) in threads.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + had, before[1] + waited)
    busiest = max((had + waited for had, waited in totals.values()), default=0.0)
    return max(
        ((had + waited) / had for had, waited in totals.values() if had and had + waited >= busiest / 2), default=1.0
    )


def crowding(load_averages: Sequence[float], threads: int, cores: int) -> float:
    """The slowdown where the others that the load averages count, beside our own threads, want cores too."""
    others = max(0.0, max(load_averages, default=0.0) - threads)
    return min(MAX_CROWDING, max(1.0, (others + threads) / max(1, cores)))


def time_interval(seconds: float, noise: ProbeNoise, errors: Sequence[float]) -> tuple[float, float]:
    """Around a prediction of `seconds`, what should hold four of five outcomes.

    errors: log(actual / predicted) of earlier runs on this machine, oldest first. Where plans were always too short,
    the interval reaches further up; it always holds the prediction itself.
    """
    newest = sorted(errors[-NEWEST:])
    count = len(newest)
    degrees = PROBE_WEIGHT + count
    centre = sum(newest) / degrees
    variance = (PROBE_WEIGHT * noise.deviation**2 + sum((error - centre) ** 2 for error in newest)) / degrees
    off_centre = math.sqrt(1 + count / degrees**2)  # the centre is a mean over so many runs, and off by as much itself
    half = _student_90(degrees) * off_centre * max(noise.seen, math.sqrt(variance))
    low, high = min(0.0, centre - half), max(0.0, centre + half)
    if count >= ENOUGH:
        place = min(count, math.ceil(0.9 * (count + 1)))  # the 0.9 quantile of the next one (split conformal)
        low, high = min(low, newest[count - place]), max(high, newest[place - 1])
    return seconds * math.exp(low), seconds * math.exp(high)


def _student_90(degrees: int) -> float:
    """The 0.9 quantile of Student's t (Cornish-Fisher expansion; 2 % low at two degrees)."""
    z = NORMAL_90
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
