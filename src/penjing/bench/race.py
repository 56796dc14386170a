"""Pretraining side by side: what each contender is given, what it says of itself, and the clock that it runs against.

Three kinds. `path`: each goes its own way from the text to a trained model, for so many seconds after its first step;
held-out text is looked at on the way, and that is nobody's time. `step`: all get the same packed rows of the same ids,
so that only the step itself is compared. `pilot`: as `path`, but held-out text is not looked at and at least `steps`
steps are taken; bench/tune.py chooses a peer's options by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penjing.base.process_info import peak_resident_bytes, process_age_seconds

IGNORED = -100  # a target that does not count, as torch's cross-entropy has it


@dataclass(frozen=True, kw_only=True)
class RaceSpec:
    """One contender's trial."""

    kind: str  # path, step or pilot
    text: str  # JSONL of documents to learn from
    tokenizer: str  # folder, in the format of transformers
    shape: dict[str, Any]  # a transformers configuration of Qwen3
    run: str  # run.toml of our own run
    held_out: str  # .npz, see `HeldOut`
    rows: str  # .npz of packed rows for the step, ids and documents
    out: str  # folder of this trial
    threads: int
    batch: int  # rows of a step
    row_tokens: int
    seconds: float  # path: how long it trains after its first step
    looks: int  # path: how often it looks at held-out text on the way
    steps: int  # step: how many it takes; pilot: how many at least
    warmup: int  # steps that no rate counts
    device: str
    learning_rate: float
    clip_norm: float
    betas: tuple[float, float]
    weight_decay: float
    seed: int = 1
    dtype: str = "float32"  # of matmuls, never `auto`: the parent decides once, for ours too
    compiled: bool = False  # peers: torch.compile
    # ours, with the recipe's optimizer: times its learning rates; learning_rate has it already
    rate_factor: float = 1.0


class HeldOut:
    """Documents that nobody learns, one to a row: ids_BT with the token that opens a text in front, target_BT with
    IGNORED where nothing is to be said, and the bytes of text that the targets stand for."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.ids_BT, self.target_BT = file["ids_BT"], file["target_BT"]
            self.num_bytes = int(file["num_bytes"])

    def batches(self, rows: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Cut to their longest row."""
        for first in range(0, len(self.ids_BT), rows):
            target_BT = self.target_BT[first : first + rows]
            longest = int((target_BT != IGNORED).sum(axis=1).max())
            yield self.ids_BT[first : first + rows, :longest], target_BT[:, :longest]

    def bits_per_byte(self, nats: Callable[[Any, Any], float], rows: int = 16) -> float:
        """nats(ids_BT, target_BT): the sum over the targets that count."""
        total = sum(nats(ids_BT, target_BT) for ids_BT, target_BT in self.batches(rows))
        return total / math.log(2) / self.num_bytes


@dataclass
class Race:
    """A contender calls `step` after each optimizer step, with the tokens it learned from; it goes on while it may.

    Tokens are positions that hold a token of text and have a target; padding is never one. Seconds count from the
    start of the process, libraries and tokenizing included; looks at held-out text do not count. A device with a queue
    is waited for where a count begins or ends, and nowhere between.
    """

    spec: RaceSpec
    look: Callable[[], float]  # bits per byte of the held-out text, now
    age: Callable[[], float] = process_age_seconds
    cpu_clock: Callable[[], float] = time.process_time
    curve: list[dict[str, float]] = field(default_factory=list)
    laps: list[float] = field(default_factory=list)
    cpu_laps: list[float] = field(default_factory=list)
    lap_tokens: list[int] = field(default_factory=list)
    imported_bytes: int = 0
    trained_bytes: int = 0
    _ready: float = 0.0
    _first: float = 0.0
    _looked: float = 0.0  # seconds spent looking
    _last: float = 0.0
    _last_cpu: float = 0.0

    def imported(self) -> None:
        self.imported_bytes = self._peak_bytes()

    def ready(self) -> None:
        """Called right before the first step."""
        self._wait()
        self._ready = self.age()
        if self.spec.kind == "path":
            self._note(self._ready)
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._last, self._last_cpu = self.age() - self._looked, self.cpu_clock()

    @property
    def _on_gpu(self) -> bool:
        return self.spec.device.startswith("cuda")

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        """Of the device that computes: what torch has taken of a GPU's memory, what a process has resident."""
        return torch.cuda.max_memory_reserved() if self._on_gpu else peak_resident_bytes()

    def step(self, tokens: int) -> bool:
        now = self.age() - self._looked
        if self._is_edge(now):
            self._wait()
            now = self.age() - self._looked
        cpu = self.cpu_clock()
        self.laps.append(now - self._last)
        self.cpu_laps.append(cpu - self._last_cpu)
        self.lap_tokens.append(tokens)
        self._first = self._first or now
        over = self._is_over(now)
        if self.spec.kind == "path" and (over or now - self._first >= self._next_look()):
            self._note(now)
        self._last, self._last_cpu = self.age() - self._looked, self.cpu_clock()
        return not over

    def _is_over(self, now: float) -> bool:
        enough = len(self.laps) >= self.spec.steps
        late = now - self._first >= self.spec.seconds
        return {"path": late, "step": enough, "pilot": late and enough}[self.spec.kind]

    def _is_edge(self, now: float) -> bool:
        """Whether a count begins or ends with this step, or held-out text is looked at. Of a pilot each step counts."""
        if self.spec.kind == "pilot":
            return True
        done = len(self.laps) + 1
        if done in (1, self.spec.warmup) or (self.spec.kind == "step" and done >= self.spec.steps):
            return True
        return self.spec.kind == "path" and now - self._first >= min(self._next_look(), self.spec.seconds)

    def _next_look(self) -> float:
        return self.spec.seconds * len(self.curve) / self.spec.looks

    def _note(self, now: float) -> None:
        if len(self.curve) == 1:  # what looking takes is not training's: the first look after some steps ends the count
            self.trained_bytes = self._peak_bytes()
        began = self.age()
        bits = self.look()
        self._looked += self.age() - began
        self.curve.append({"seconds": now, "tokens": float(sum(self.lap_tokens)), "bits_per_byte": bits})

    def result(self, **more: Any) -> dict[str, Any]:
        """What a trial prints. startup: until the first step; first_step: compiling is in it."""
        return {
            "startup_seconds": self._ready,
            "first_step_seconds": self.laps[0],
            "step_seconds": self.laps,
            "step_cpu_seconds": self.cpu_laps,
            "step_tokens": self.lap_tokens,
            "curve": self.curve,
            "peak_bytes": self.trained_bytes or self._peak_bytes(),
            "peak_bytes_after_imports": self.imported_bytes,
            **more,
        }


def packed_rows(spec: RaceSpec) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """step: ids_BT with one token more than a row has positions, and documents, batch after batch, without end."""
    with np.load(spec.rows) as file:
        ids_NT, document_NT = file["ids_NT"], file["document_NT"]
    first = 0
    while True:
        index = np.arange(first, first + spec.batch) % len(ids_NT)
        yield ids_NT[index], document_NT[index]
        first += spec.batch


def out_folder(spec: RaceSpec) -> Path:
    return Path(spec.out)
