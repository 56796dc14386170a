"""The 80 % interval of a predicted time on this machine under its current load.

Errors are log(actual / predicted): twice as long and half as long are equally far off. Three sources determine the
interval: the noise that the probe measured (its spread, the load of the machine), the noise expected of such machines,
and the errors of the newest plans on this machine. The first always counts. The second is a prior, which the third
replaces run by run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from penjing.plan.device_model import MARGINS

NORMAL_90 = NormalDist().inv_cdf(0.9)  # 80 % of a normal distribution lie within so many standard deviations
MAX_RUNS = 20  # newest runs of the history that are used
PROBE_WEIGHT = 2  # the probe's deviation counts as so many runs
MIN_RUNS_FOR_QUANTILES = 4  # from so many runs on, the interval includes their quantiles
# Fraction of a timing's variance that averaging does not reduce: other load lasts longer than a probe. In five series
# the mean of one second differed from that of the next fifteen by 0.2 to 1.4 of this variance, 0.4 in the median.
CORRELATED_SHARE = 0.4
# Standard deviation if our threads use every core: all wait for the slowest one, any other process delays it, and
# virtual cores share physical ones. Plans for two threads on two virtual cores were off by 3 to 11 % (root mean square
# of ten runs each), which one-second probes hardly showed; those for one thread by 1 to 2 %.
ALL_CORES = 0.1
MAX_CROWDING = 3.0  # upper limit: a load average also counts processes that wait for a disk
BUSY_SHARE = 0.4  # of log(slowdown): other load may end or begin during the run


@dataclass(frozen=True, kw_only=True)
class ProbeNoise:
    """Timing noise measured by a probe."""

    spread: float = 0.0  # half-width of the central 80 % of timings, divided by their mean
    num_timed: int = 1
    slowdown: float = 1.0  # of the slowest thread, by waiting for a core; 1 = none waited
    crowding: float = 1.0  # expected slowdown if all processes of the load average compute at once; 1 = none
    all_cores: bool = False  # whether our threads use every core

    @property
    def lasting_slowdown(self) -> float:
        """The expected slowdown of the full run. A probe is short: if its slowdown exceeds what the load average
        explains, half of the excess (in the logarithm) counts as chance."""
        return math.sqrt(self.slowdown * self.crowding) if 1.0 < self.crowding < self.slowdown else self.slowdown

    @property
    def probe_deviation(self) -> float:
        """Standard deviation of log(actual / predicted), from the probe's noise alone."""
        timing = (self.spread / NORMAL_90) ** 2 * (CORRELATED_SHARE + 1 / max(1, self.num_timed))
        busy = BUSY_SHARE * math.log(max(1.0, self.lasting_slowdown, self.crowding))
        return math.sqrt((MARGINS["L2"] / NORMAL_90) ** 2 + timing + busy**2)

    @property
    def deviation(self) -> float:
        """Expected standard deviation of log(actual / predicted), without any history of this machine."""
        return math.hypot(self.probe_deviation, ALL_CORES if self.all_cores else 0.0)


def slowdown(steps: Iterable[Mapping[str, tuple[float, float]]]) -> float:
    """Slowdown of the slowest thread by waiting for a core; 1 = none waited.

    steps: for each step, seconds that every thread ran, and that it waited for a core. Threads that are runnable for
    less than half as long as the busiest one, such as data loaders, do not count.
    """
    totals: dict[str, tuple[float, float]] = {}
    for threads in steps:
        for name, (ran, waited) in threads.items():
            previous = totals.get(name, (0.0, 0.0))
            totals[name] = (previous[0] + ran, previous[1] + waited)
    busiest = max((ran + waited for ran, waited in totals.values()), default=0.0)
    return max(
        ((ran + waited) / ran for ran, waited in totals.values() if ran and ran + waited >= busiest / 2), default=1.0
    )


def crowding(load_averages: Sequence[float], threads: int, cores: int) -> float:
    """The slowdown if the other processes in the load averages compete with our threads for cores."""
    others = max(0.0, max(load_averages, default=0.0) - threads)
    return min(MAX_CROWDING, max(1.0, (others + threads) / max(1, cores)))


def time_interval(seconds: float, noise: ProbeNoise, errors: Sequence[float]) -> tuple[float, float]:
    """The 80 % interval around a prediction of `seconds`.

    errors: log(actual / predicted) of earlier runs on this machine, oldest first. If plans were always too short, the
    interval extends further up. It always contains the prediction.
    """
    newest = sorted(errors[-MAX_RUNS:])
    count = len(newest)
    degrees = PROBE_WEIGHT + count
    centre = sum(newest) / degrees
    variance = (PROBE_WEIGHT * noise.deviation**2 + sum((error - centre) ** 2 for error in newest)) / degrees
    off_centre = math.sqrt(1 + count / degrees**2)  # adds the standard error of the centre, a mean over runs
    half_width = _student_90(degrees) * off_centre * max(noise.probe_deviation, math.sqrt(variance))
    low, high = min(0.0, centre - half_width), max(0.0, centre + half_width)
    if count >= MIN_RUNS_FOR_QUANTILES:
        rank = min(count, math.ceil(0.9 * (count + 1)))  # 0.9 quantile of the next error (split conformal)
        low, high = min(low, newest[count - rank]), max(high, newest[rank - 1])
    return seconds * math.exp(low), seconds * math.exp(high)


def _student_90(degrees: int) -> float:
    """The 0.9 quantile of Student's t (Cornish-Fisher expansion; 2 % low at two degrees)."""
    z = NORMAL_90
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
