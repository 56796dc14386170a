"""Computes throughput, MFU and time shares, all in one place. One clock, which a test may replace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penjing.plan.run_estimate import PARTS, RunEstimate
from penjing.train.signals import running_seconds

REFIT_SHARE = 0.02  # fraction of the steps after which the run's duration is estimated again
MIN_REFIT_STEPS = 5  # but at least after this many steps
SAVED = ("tokens", "seconds", "data_wait_seconds", "steps", "slowest_seconds", "refit")  # in a checkpoint


class Refit(NamedTuple):
    """The run's duration, estimated after its first steps (level L3)."""

    step: int
    seconds: float


@dataclass
class Meter:
    """Counts tokens and seconds. Padding is not counted.

    flops_per_token, peak: for MFU = tokens/s x flops_per_token / (peak x ranks); without a peak there is no MFU. The
    peak is one device's, the tokens are all ranks'. sum_ranks: sums a count over ranks; all ranks call it together.
    peak_memory_bytes: called at each logged step, if given. flops_per_token counts the keys that queries attend to;
    flops_per_token_full_square counts T keys for every query, as PaLM and nanoGPT do (0: unknown). expected: the plan,
    with which the metrics of each interval are compared.
    """

    flops_per_token: float
    peak_flops_per_second: float | None
    clock: Callable[[], float] = running_seconds
    peak_memory_bytes: Callable[[], int] | None = None
    flops_per_token_full_square: float = 0.0
    expected: RunEstimate | None = None
    sum_ranks: Callable[[int], int] = lambda count: count
    tokens: int = 0  # of all ranks, at the last sum over ranks
    steps: int = 0
    slowest_seconds: float = 0.0  # of the run's steps so far
    refit: Refit | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    data_wait_seconds: float = 0.0
    _local_tokens: int = 0  # of this rank, since that sum
    _world: int = 0  # ranks of the last step; 0: no step in this process yet
    _interval_tokens: int = 0
    _interval_seconds: float = 0.0
    _interval_steps: int = 0
    _interval_wait_start: float = 0.0  # data_wait_seconds at the start of the interval

    @contextmanager
    def share(self, name: str) -> Iterator[None]:
        """Time spent inside counts as `name`, one of PARTS."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - start

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Time spent inside counts as the wait for data, a part of training."""
        start = self.clock()
        try:
            yield
        finally:
            self.data_wait_seconds += self.clock() - start

    @contextmanager
    def step(self, world: int) -> Iterator[None]:
        """Context of one optimizer step, inside which the caller counts this rank's tokens."""
        start = self.clock()
        with self.share("training"):
            yield
        seconds = self.clock() - start
        self._world = world
        self._interval_seconds += seconds
        self._interval_steps += 1
        self.steps += 1
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        self._refit_if_due()

    @property
    def longest_seconds(self) -> float:
        """The slowest step so far, but at least the planned time; 0 before this process has taken (compiled) a step.

        The planned time matters on a GPU, where the host finishes the first steps of an interval before the GPU does.
        """
        planned = self.expected.step_seconds if self.expected else 0.0
        return max(self.slowest_seconds, planned) if self._world else 0.0

    def count(self, tokens: int) -> None:
        """Add tokens of this rank."""
        self._local_tokens += tokens

    def all_tokens(self) -> int:
        """Tokens of all ranks so far. All ranks call this, `interval` and `state` together."""
        new_tokens, self._local_tokens = self.sum_ranks(self._local_tokens), 0
        self.tokens += new_tokens
        self._interval_tokens += new_tokens
        return self.tokens

    def _refit_if_due(self) -> None:
        """Once, early in the run: estimate its duration from the steps so far and the plan of the other work."""
        plan = self.expected
        if plan is None or self.refit is not None or self.steps < max(MIN_REFIT_STEPS, REFIT_SHARE * plan.steps):
            return
        self.refit = Refit(self.steps, self.seconds["training"] / self.steps * plan.steps + plan.other_seconds)

    def interval(self, steps_left: int) -> dict[str, float]:
        """Throughput metrics since the last call."""
        if not self._interval_seconds or not self._interval_steps:
            return {}
        tokens = self.all_tokens()
        rate = self._interval_tokens / self._interval_seconds
        metrics = {
            "tokens": tokens,
            "seconds": self.total_seconds,
            "tokens_per_second": rate,
            "seconds_left": steps_left * self._interval_seconds / self._interval_steps,
        }
        if self.peak_memory_bytes:
            metrics["memory_bytes"] = self.peak_memory_bytes()
        if self.peak_flops_per_second:
            peak = self.peak_flops_per_second * self._world
            metrics["mfu"] = rate * self.flops_per_token / peak
            if self.flops_per_token_full_square:
                full = self.flops_per_token_full_square
                metrics["mfu_full_square"] = rate * full / peak
        if self.expected is not None and self.expected.step_seconds:
            step, wait = self._interval_seconds, self.data_wait_seconds - self._interval_wait_start
            planned = self._interval_steps * self.expected.step_seconds
            metrics["seconds_over_plan"] = step / planned
            # The part of the difference due to a longer wait for data; the remainder is computation.
            extra_wait = wait - self._interval_steps * self.expected.wait_seconds
            metrics["wait_over_plan"] = extra_wait / planned
        self._interval_tokens, self._interval_seconds, self._interval_steps = 0, 0.0, 0
        self._interval_wait_start = self.data_wait_seconds
        return metrics

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def totals(self) -> dict[str, float | None]:
        """Metrics of the run so far; tokens not yet summed over ranks are assumed to be equal on all ranks."""
        training, world = self.seconds["training"], max(1, self._world)
        tokens = self.tokens + self._local_tokens * world
        rate, peak = tokens / training if training else 0.0, self.peak_flops_per_second
        mfu = rate * self.flops_per_token / (peak * world) if peak else None
        return {
            "tokens": tokens,
            **{f"{name}_seconds": seconds for name, seconds in self.seconds.items()},
            "data_wait_seconds": self.data_wait_seconds,
            "tokens_per_second": rate,
            "mfu": mfu,
            "mfu_full_square": mfu * self.flops_per_token_full_square / self.flops_per_token
            if mfu is not None and self.flops_per_token
            else None,
            "refit_step": self.refit.step if self.refit else None,
            "refit_seconds": self.refit.seconds if self.refit else None,
        }

    def state(self) -> dict[str, Any]:
        self.all_tokens()
        return {name: getattr(self, name) for name in SAVED}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state, seconds=dict(state["seconds"]))
        self._interval_wait_start = self.data_wait_seconds
        self.refit = Refit(*self.refit) if self.refit else None  # JSON made a list of it
