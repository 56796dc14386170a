"""The one place where speed, utilisation and time shares are computed. One clock, which a test may replace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SHARES = ("training", "validation", "checkpoint", "sample")
REFIT_SHARE = 0.02  # of the steps, after which the time of the whole run is reckoned anew
REFIT_LEAST = 5  # steps at least


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What was planned, in seconds: a step, of it the wait for data, and all that is not training."""

    steps: int
    step_seconds: float
    wait_seconds: float = 0.0
    other_seconds: float = 0.0


class Refit(NamedTuple):
    """The time of the whole run as seen after its first steps (level L3)."""

    step: int
    seconds: float


@dataclass
class Meter:
    """Counts tokens and seconds. Tokens are positions that hold a token; padding is never counted.

    flops_per_token, peak: for MFU = tokens/s x flops_per_token / (peak x ranks); None peak gives no MFU. The peak
    is one device's, the tokens are all ranks'. sum_ranks: adds a count up over ranks, which all ask together.
    peak_memory_bytes: asked at each logged step, where given. flops_per_token counts the keys really seen; the same
    with T keys for every query, as PaLM and nanoGPT count, is flops_per_token_full_square (0: not known).
    expected: the plan, which the figures of each interval are set beside.
    """

    flops_per_token: float
    peak_flops_per_second: float | None
    clock: Callable[[], float] = time.perf_counter
    peak_memory_bytes: Callable[[], int] | None = None
    flops_per_token_full_square: float = 0.0
    expected: Expected | None = None
    sum_ranks: Callable[[int], int] = lambda count: count
    tokens: int = 0  # of all ranks, when they were last summed
    steps: int = 0
    slowest_seconds: float = 0.0  # of the run's steps so far
    refit: Refit | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    data_wait_seconds: float = 0.0
    _own_tokens: int = 0  # of this rank, since then
    _world: int = 0  # ranks of the last step; 0: this process has not taken one
    _interval_tokens: int = 0
    _interval_seconds: float = 0.0
    _interval_steps: int = 0
    _interval_wait_start: float = 0.0  # data_wait_seconds when the interval began

    @contextmanager
    def share(self, name: str) -> Iterator[None]:
        """Time spent inside counts as `name`, one of SHARES."""
        start = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - start

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Inside training: the part of it spent waiting for the next batch."""
        start = self.clock()
        try:
            yield
        finally:
            self.data_wait_seconds += self.clock() - start

    @contextmanager
    def step(self, world: int) -> Iterator[None]:
        """One optimizer step, within which the caller counts this rank's tokens."""
        start = self.clock()
        with self.share("training"):
            yield
        seconds = self.clock() - start
        self._world = world
        self._interval_seconds += seconds
        self._interval_steps += 1
        self.steps += 1
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        self._fit_again()

    @property
    def longest_seconds(self) -> float:
        """What a step took at most so far, or takes by plan; 0 in a process that has yet to take, and compile, one.

        By plan too: a GPU's host is soon done with the first steps of an interval, before the GPU is.
        """
        planned = self.expected.step_seconds if self.expected else 0.0
        return max(self.slowest_seconds, planned) if self._world else 0.0

    def count(self, tokens: int) -> None:
        """More tokens of this rank."""
        self._own_tokens += tokens

    def all_tokens(self) -> int:
        """Tokens of all ranks so far; they ask together, as they do for `interval` and `state`."""
        more, self._own_tokens = self.sum_ranks(self._own_tokens), 0
        self.tokens += more
        self._interval_tokens += more
        return self.tokens

    def _fit_again(self) -> None:
        """Once, early in the run: what all of it will take, from the steps so far and the plan of the rest."""
        plan = self.expected
        if plan is None or self.refit is not None or self.steps < max(REFIT_LEAST, REFIT_SHARE * plan.steps):
            return
        self.refit = Refit(self.steps, self.seconds["training"] / self.steps * plan.steps + plan.other_seconds)

    def interval(self, steps_left: int) -> dict[str, float]:
        """Speed figures since the last call."""
        if not self._interval_seconds or not self._interval_steps:
            return {}
        tokens = self.all_tokens()
        rate = self._interval_tokens / self._interval_seconds
        figures = {
            "tokens": tokens,
            "seconds": self.total_seconds,
            "tokens_per_second": rate,
            "seconds_left": steps_left * self._interval_seconds / self._interval_steps,
        }
        if self.peak_memory_bytes:
            figures["memory_bytes"] = self.peak_memory_bytes()
        if self.peak_flops_per_second:
            peak = self.peak_flops_per_second * self._world
            figures["mfu"] = rate * self.flops_per_token / peak
            if self.flops_per_token_full_square:
                full = self.flops_per_token_full_square
                figures["mfu_full_square"] = rate * full / peak
        if self.expected is not None and self.expected.step_seconds:
            step, wait = self._interval_seconds, self.data_wait_seconds - self._interval_wait_start
            planned = self._interval_steps * self.expected.step_seconds
            figures["seconds_over_plan"] = step / planned
            # The part of the difference that is a longer wait for data; the rest is computation.
            late = wait - self._interval_steps * self.expected.wait_seconds
            figures["wait_over_plan"] = late / planned
        self._interval_tokens, self._interval_seconds, self._interval_steps = 0, 0.0, 0
        self._interval_wait_start = self.data_wait_seconds
        return figures

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def totals(self) -> dict[str, float | None]:
        """Figures of the whole run so far; tokens that were not summed yet are taken for as many on every rank."""
        training, world = self.seconds["training"], max(1, self._world)
        tokens = self.tokens + self._own_tokens * world
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
        return {
            "tokens": self.all_tokens(),
            "seconds": self.seconds,
            "data_wait_seconds": self.data_wait_seconds,
            "steps": self.steps,
            "slowest_seconds": self.slowest_seconds,
            "refit": self.refit,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]
        self.seconds = dict(state["seconds"])
        self.data_wait_seconds = self._interval_wait_start = state["data_wait_seconds"]
        self.steps = state.get("steps", 0)
        self.slowest_seconds = state.get("slowest_seconds", 0.0)
        self.refit = Refit(*state["refit"]) if state.get("refit") else None
