"""The one place where speed, utilisation and time shares are computed. One clock, which a test may replace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SHARES = ("training", "validation", "checkpoint", "sample")


@dataclass
class Meter:
    """Counts tokens and seconds. Tokens are positions that hold a token; padding is never counted.

    flops_per_token, peak: for MFU = tokens/s x flops_per_token / peak; None peak gives no MFU.
    peak_memory_bytes: asked at each logged step, where given.
    """

    flops_per_token: float
    peak_flops_per_second: float | None
    clock: Callable[[], float] = time.perf_counter
    peak_memory_bytes: Callable[[], int] | None = None
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    data_wait_seconds: float = 0.0
    _interval_tokens: int = 0
    _interval_seconds: float = 0.0
    _recent_seconds_per_step: float | None = None
    _interval_steps: int = 0

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
    def step(self, world: int) -> Iterator[StepCount]:
        """One optimizer step; the caller adds this rank's tokens to what is yielded."""
        start = self.clock()
        counted = StepCount()
        with self.share("training"):
            yield counted
        tokens = counted.tokens * world
        self.tokens += tokens
        self._interval_tokens += tokens
        self._interval_seconds += self.clock() - start
        self._interval_steps += 1

    def interval(self, steps_left: int) -> dict[str, float]:
        """Speed figures since the last call."""
        if not self._interval_seconds or not self._interval_steps:
            return {}
        rate = self._interval_tokens / self._interval_seconds
        figures = {
            "tokens": self.tokens,
            "seconds": self.total_seconds,
            "tokens_per_second": rate,
            "seconds_left": steps_left * self._interval_seconds / self._interval_steps,
        }
        if self.peak_memory_bytes:
            figures["memory_bytes"] = self.peak_memory_bytes()
        if self.peak_flops_per_second:
            figures["mfu"] = rate * self.flops_per_token / self.peak_flops_per_second
        self._interval_tokens, self._interval_seconds, self._interval_steps = 0, 0.0, 0
        return figures

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def totals(self) -> dict[str, float | None]:
        """Figures of the whole run so far."""
        training = self.seconds["training"]
        rate = self.tokens / training if training else 0.0
        mfu = rate * self.flops_per_token / self.peak_flops_per_second if self.peak_flops_per_second else None
        return {
            "tokens": self.tokens,
            **{f"{name}_seconds": seconds for name, seconds in self.seconds.items()},
            "data_wait_seconds": self.data_wait_seconds,
            "tokens_per_second": rate,
            "mfu": mfu,
        }

    def state(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds, "data_wait_seconds": self.data_wait_seconds}

    def restore(self, state: dict[str, Any]) -> None:
        self.tokens = state["tokens"]
        self.seconds = dict(state["seconds"])
        self.data_wait_seconds = state["data_wait_seconds"]


@dataclass(slots=True)
class StepCount:
    """Tokens of one step on this rank."""

    tokens: int = 0
