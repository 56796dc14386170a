"""The timer of a trial: seconds of steps, and peak memory. The training loop of a contestant calls it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from compare.trial_spec import TrialSpec
from penjing.base.process_info import peak_resident_bytes, process_age_seconds


@dataclass
class TrialTimer:
    """A contestant calls `step` after each optimizer step, and continues while it returns True.

    A step's time includes data, sampling, rewards and logging. Seconds count from the start of the process, including
    imports and tokenizing, but not evaluations on held-out text. A GPU is synchronized only where a measurement begins
    or ends.
    """

    spec: TrialSpec
    evaluate: Callable[[], float] = lambda: math.nan  # bits per byte of the held-out text, now
    age: Callable[[], float] = process_age_seconds
    cpu_clock: Callable[[], float] = time.process_time
    curve: list[dict[str, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_cpu_seconds: list[float] = field(default_factory=list)  # of all threads of this process
    step_units: list[int] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    imported_bytes: int = 0
    trained_bytes: int = 0
    _ready: float = 0.0
    _first: float = 0.0  # end of the first step
    _evaluated: float = 0.0  # seconds spent on evaluations
    _last: float = 0.0
    _last_cpu: float = 0.0

    def imported(self) -> None:
        """Called after the imports, before anything else is allocated."""
        self.imported_bytes = self._peak_bytes()

    def ready(self) -> None:
        """Called directly before the first step."""
        self._wait()
        self._ready = self.age()
        if self.spec.setting == "path":
            self._evaluate(self._ready)
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._begin_step()

    def step(self, units: int, **figures: float) -> bool:
        """units: tokens (without padding), pairs or prompts trained on. figures: metrics of the step."""
        now = self.age() - self._evaluated
        if self._needs_sync(now):
            self._wait()
            now = self.age() - self._evaluated
        self.step_seconds.append(now - self._last)
        self.step_cpu_seconds.append(self.cpu_clock() - self._last_cpu)
        self.step_units.append(units)
        if figures:
            self.figures.append(figures)
        self._first = self._first or now
        over = self._is_over(now)
        if self.spec.setting == "path" and (over or now - self._first >= self._next_evaluation()):
            self._evaluate(now)
        self._begin_step()
        return not over

    def result(self, **more: Any) -> dict[str, Any]:
        """The JSON that a trial prints. startup: until the first step; compiling counts in the first step."""
        return {
            "startup_seconds": self._ready,
            "step_seconds": self.step_seconds,
            "step_cpu_seconds": self.step_cpu_seconds,
            "step_units": self.step_units,
            "figures": self.figures,
            "curve": self.curve,
            "peak_bytes": self.trained_bytes or self._peak_bytes(),
            "peak_bytes_after_imports": self.imported_bytes,
            **more,
        }

    @property
    def _on_gpu(self) -> bool:
        return self.spec.device.startswith("cuda")

    def _begin_step(self) -> None:
        self._last, self._last_cpu = self.age() - self._evaluated, self.cpu_clock()

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        """Peak memory of the compute device: reserved by torch on a GPU, resident on a CPU."""
        return torch.cuda.max_memory_reserved() if self._on_gpu else peak_resident_bytes()

    def _is_over(self, now: float) -> bool:
        enough = len(self.step_seconds) >= self.spec.steps
        timed_out = now - self._first >= self.spec.seconds
        return {"path": timed_out, "pilot": timed_out and enough}.get(self.spec.setting, enough)

    def _needs_sync(self, now: float) -> bool:
        """Whether a measurement begins or ends with this step, or an evaluation follows. In a pilot every step does."""
        if self.spec.setting == "pilot":
            return True
        step_number = len(self.step_seconds) + 1
        if step_number in (1, self.spec.warmup) or (self.spec.setting != "path" and step_number >= self.spec.steps):
            return True
        return self.spec.setting == "path" and now - self._first >= min(self._next_evaluation(), self.spec.seconds)

    def _next_evaluation(self) -> float:
        return self.spec.seconds * len(self.curve) / self.spec.evaluations

    def _evaluate(self, now: float) -> None:
        if len(self.curve) == 1:  # peak memory excludes evaluations
            self.trained_bytes = self._peak_bytes()
        began = self.age()
        bits = self.evaluate()
        self._evaluated += self.age() - began
        self.curve.append({"seconds": now, "tokens": float(sum(self.step_units)), "bits_per_byte": bits})
