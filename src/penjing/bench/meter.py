"""What every trial is measured with, ours and the others' alike: laps of one clock, and the mark of resident memory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penjing.base.process_info import peak_resident_bytes


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One trial, the same for ours and a peer. Units are what a batch counts: pairs, prompts."""

    method: str
    model: str  # Hugging Face directory that both begin with
    data: str  # JSONL in the order that it is learned in, for peers
    run: str  # run.toml of our own run
    stage: str  # what makes our stage, `module:name`
    out: str  # folder of this trial
    threads: int
    batch: int  # units of one optimizer step
    micro: int  # units of one forward pass
    steps: int
    learning_rate: float
    clip_norm: float
    betas: tuple[float, float]
    beta: float = 0.0  # dpo: of its loss; grpo: weight of the divergence
    reference: str = "copy"  # dpo: copy or precomputed
    answers: int = 0  # grpo: to each prompt
    max_tokens: int = 0  # grpo: of an answer
    temperature: float = 1.0
    match: str = ""  # grpo: says whether an answer is one of the reference answers, `module:name`
    seed: int = 1
    dtype: str = "float32"
    checkpointing: bool = False  # peer: whether activations are computed twice to save memory


AnySpec = TypeVar("AnySpec")


def read_spec(kind: type[AnySpec]) -> AnySpec:
    """The spec whose file was named on a trial's command line."""
    values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return kind(**{**values, "betas": tuple(values["betas"])})


@dataclass
class Laps:
    """Seconds of each optimizer step, all that belongs to it included: data, sampling, rewards, logging.

    cpu_seconds: of them, what this process computed on all its threads; on a busy machine the fairer figure.
    """

    clock: Callable[[], float] = time.perf_counter
    cpu_clock: Callable[[], float] = time.process_time
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    imported_bytes: int = 0
    _last: float = 0.0
    _last_cpu: float = 0.0

    def imported(self) -> None:
        """Called when the libraries are in memory and nothing else is."""
        self.imported_bytes = peak_resident_bytes()

    def begin(self) -> None:
        """Called right before the first step."""
        self._last, self._last_cpu = self.clock(), self.cpu_clock()

    def lap(self, figures: Mapping[str, float]) -> None:
        """Called at the end of each step."""
        now, now_cpu = self.clock(), self.cpu_clock()
        self.seconds.append(now - self._last)
        self.cpu_seconds.append(now_cpu - self._last_cpu)
        self._last, self._last_cpu = now, now_cpu
        self.figures.append(dict(figures))

    def result(self, **more: Any) -> dict[str, Any]:
        """What a trial prints."""
        return {
            "step_seconds": self.seconds,
            "step_cpu_seconds": self.cpu_seconds,
            "figures": self.figures,
            "peak_bytes": peak_resident_bytes(),
            "peak_bytes_after_imports": self.imported_bytes,
            **more,
        }


def units_per_second(trial: Mapping[str, Any], batch: int, warmup: int) -> float:
    """Units over seconds of the steps after `warmup`."""
    steps: Sequence[float] = trial["step_seconds"][warmup:]
    return batch * len(steps) / sum(steps)
