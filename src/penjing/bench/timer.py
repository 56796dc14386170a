"""The one timer: seconds of steps, and the mark of memory.

`TrialTimer` is called by a loop, penjing's or another trainer's; `time_steps` has the loop itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from penjing.base.process_info import peak_resident_bytes, process_age_seconds
from penjing.bench.trial_spec import TrialSpec


@dataclass
class TrialTimer:
    """A contestant calls `step` after each optimizer step, and goes on while it returns True.

    The time of a step holds all that belongs to it: data, sampling, rewards, logging. Seconds count from the start of
    the process, libraries and tokenizing included; evaluations on held-out text do not count. A device with a queue is
    waited for where a count begins or ends, and nowhere between.
    """

    spec: TrialSpec
    evaluate: Callable[[], float] = lambda: math.nan  # bits per byte of the held-out text, now
    age: Callable[[], float] = process_age_seconds
    cpu_clock: Callable[[], float] = time.process_time
    curve: list[dict[str, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_cpu_seconds: list[float] = field(default_factory=list)  # of this process, on all its threads
    step_units: list[int] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    imported_bytes: int = 0
    trained_bytes: int = 0
    _ready: float = 0.0
    _first: float = 0.0  # when the first step was over
    _evaluated: float = 0.0  # seconds spent on evaluations
    _last: float = 0.0
    _last_cpu: float = 0.0

    def imported(self) -> None:
        """Called when the libraries are in memory and nothing else is."""
        self.imported_bytes = self._peak_bytes()

    def ready(self) -> None:
        """Called right before the first step."""
        self._wait()
        self._ready = self.age()
        if self.spec.setting == "path":
            self._evaluate(self._ready)
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._begin_step()

    def step(self, units: int, **figures: float) -> bool:
        """units: tokens, pairs or prompts learned from; a token of padding is none. figures: what the step found."""
        now = self.age() - self._evaluated
        if self._is_edge(now):
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
        """What a trial prints. startup: until the first step; compiling is in the first step."""
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
        """Of the device that computes: what torch has taken of a GPU's memory, what a process has resident."""
        return torch.cuda.max_memory_reserved() if self._on_gpu else peak_resident_bytes()

    def _is_over(self, now: float) -> bool:
        enough = len(self.step_seconds) >= self.spec.steps
        late = now - self._first >= self.spec.seconds
        return {"path": late, "pilot": late and enough}.get(self.spec.setting, enough)

    def _is_edge(self, now: float) -> bool:
        """Whether a count begins or ends with this step, or an evaluation follows. Of a pilot each step counts."""
        if self.spec.setting == "pilot":
            return True
        done = len(self.step_seconds) + 1
        if done in (1, self.spec.warmup) or (self.spec.setting != "path" and done >= self.spec.steps):
            return True
        return self.spec.setting == "path" and now - self._first >= min(self._next_evaluation(), self.spec.seconds)

    def _next_evaluation(self) -> float:
        return self.spec.seconds * len(self.curve) / self.spec.evaluations

    def _evaluate(self, now: float) -> None:
        if len(self.curve) == 1:  # the count of memory ends here: evaluations are not training
            self.trained_bytes = self._peak_bytes()
        began = self.age()
        bits = self.evaluate()
        self._evaluated += self.age() - began
        self.curve.append({"seconds": now, "tokens": float(sum(self.step_units)), "bits_per_byte": bits})


def time_steps(
    step: Callable[[int], object],
    device: torch.device,
    *,
    steps: int,
    warmup: int = 0,
    lot: int = 1,
    seconds: float = math.inf,
) -> list[float]:
    """Seconds of a step, from each lot of steps after `warmup` ones: the device's queue is waited for after a lot.

    At least two lots are timed, and no further ones once they have taken `seconds`.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for number in range(warmup):
        step(number)
    wait()
    taken: list[float] = []
    for first in range(warmup, warmup + steps, lot):
        began = time.perf_counter()
        for number in range(first, first + lot):
            step(number)
        wait()
        taken.append((time.perf_counter() - began) / lot)
        if len(taken) >= 2 and sum(taken) * lot > seconds:
            break
    return taken
