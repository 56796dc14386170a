"""The loop. It knows a model callable, a source of batches, an objective, optimizers, an engine and trackers.

It has no branch for a stage, a model or an engine: what a step is stands in `step`, what happens between in `train`.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.feed.source import Source
from penjing.objective.base import Objective
from penjing.optim.schedule import Schedule
from penjing.parallel.base import Engine
from penjing.track.base import Trackers
from penjing.train.meter import Meter


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything one run is made of. `assemble` makes it; tests make smaller ones."""

    engine: Engine
    model: Callable[..., Tensor]  # wrapped by the engine
    objective: Objective
    source: Source
    optimizers: list[torch.optim.Optimizer]
    schedule: Schedule
    trackers: Trackers
    meter: Meter
    num_steps: int
    accumulate: int  # micro-batches per step on each rank
    clip_norm: float
    log_every: int
    validate_every: int
    sample_every: int
    save_every: int
    validate: Callable[[], dict[str, float]]
    sample: Callable[[int], None]
    save: Callable[[dict[str, Any]], None]  # makes the state durable


@dataclass
class Progress:
    """How far a run is, with what is summed since the last logged step. Saved with every checkpoint."""

    step: int = 0
    total: Tensor | float = 0.0  # loss summed over units, on this rank
    units: Tensor | float = 0.0  # units, over all ranks

    def add(self, total: Tensor, units: Tensor) -> None:
        """One more step is done. Tensors stay on the device: nothing waits here."""
        self.step += 1
        self.total, self.units = self.total + total, self.units + units

    def state(self, engine: Engine) -> dict[str, Any]:
        """JSON values, the same on every rank."""
        total = engine.add(torch.as_tensor(self.total, device=engine.device))
        return {"step": self.step, "total": float(total), "units": float(self.units)}

    @classmethod
    def restore(cls, state: dict[str, Any], engine: Engine) -> Progress:
        """What was summed over ranks goes on in rank 0."""
        return cls(state["step"], state["total"] if engine.rank == 0 else 0.0, state["units"])


class Stopped(Exception):
    """A signal ended the run at the edge of a step, after a checkpoint. `exit_code` is 128 + signal."""

    def __init__(self, number: int, step: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; the same command continues")


def step(parts: Parts, index: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """One optimizer step: returns the summed loss, its units, the gradient norm, and this rank's tokens."""
    batches = []
    for _ in range(parts.accumulate):
        with parts.meter.waiting_for_data():
            batches.append(next(parts.source))
    units = parts.engine.add(torch.stack([parts.objective.weight(batch) for batch in batches]).sum())
    total = torch.zeros((), device=units.device)
    for number, batch in enumerate(batches, start=1):
        with parts.engine.micro_step(last=number == len(batches)):
            loss = parts.objective(parts.model, batch)
            # Sums over the global number of units: exact for ragged micro-batches and ranks alike.
            parts.engine.backward(loss.total / units.clamp(min=1))
        total += loss.total.detach()
    norm = parts.engine.clip(parts.clip_norm)
    factor = parts.schedule.factor(index, parts.num_steps)
    for optimizer in parts.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total, units, norm, sum(batch.num_tokens for batch in batches)


def train(parts: Parts, progress: Progress) -> dict[str, float]:
    """Take the steps that are left; log, validate, sample and save as due. Returns the last validation's figures.

    Raises Stopped after a signal, with everything saved; UserError when the loss is no longer a number.
    """
    figures: dict[str, float] = {}
    with _Signals() as signals:
        while progress.step < parts.num_steps:
            with parts.meter.step(parts.engine.world) as counted:
                total, units, norm, counted.tokens = step(parts, progress.step)
                progress.add(total, units)
                log_now = _due(progress.step, parts.log_every, parts.num_steps)
                figures_now = _step_figures(parts, progress, norm) if log_now else {}
            if log_now:
                speed = parts.meter.interval(parts.num_steps - progress.step)
                parts.trackers.log(progress.step, {**figures_now, **speed})
            if _due(progress.step, parts.validate_every, parts.num_steps):
                with parts.meter.share("validation"):
                    figures = parts.validate()
                parts.trackers.log(progress.step, {"tokens": parts.meter.tokens, **figures})
            if _due(progress.step, parts.sample_every, parts.num_steps):
                with parts.meter.share("sample"):
                    parts.sample(progress.step)
            stop = parts.engine.any(signals.received is not None)
            if stop or _due(progress.step, parts.save_every, parts.num_steps):
                with parts.meter.share("checkpoint"):
                    parts.save(progress.state(parts.engine))
            if stop and progress.step < parts.num_steps:
                raise Stopped(signals.received or signal.SIGTERM, progress.step)
    return figures


def _due(step: int, every: int, num_steps: int) -> bool:
    """Every `every` steps and at the last; 0 means never."""
    return every > 0 and (step % every == 0 or step == num_steps)


def _step_figures(parts: Parts, progress: Progress, norm: Tensor) -> dict[str, float]:
    """Figures since the last logged step. The one place where the host waits for the device."""
    sums = parts.engine.add(torch.as_tensor(progress.total, device=parts.engine.device))
    loss = float(sums) / max(1.0, float(progress.units))
    progress.total = progress.units = 0.0
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {progress.step}",
            next_step="Lower optimizer.learning_rate or lengthen schedule.warmup_fraction; checkpoints are whole.",
        )
    rate = max(group["lr"] for optimizer in parts.optimizers for group in optimizer.param_groups)
    unit = parts.objective.unit
    return {f"loss_nats_per_{unit}": loss, "learning_rate": rate, "gradient_norm": float(norm)}


class _Signals:
    """Notes SIGINT, SIGTERM and SIGHUP for the edge of the step; a second one acts at once."""

    def __enter__(self) -> _Signals:
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *error: object) -> None:
        self._restore()
