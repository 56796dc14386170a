"""The loop. It knows a model callable, a source of batches, an objective, optimizers, an engine and trackers.

It has no branch for a stage, a model or an engine: what a step is stands in `step`, what happens between in `train`.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
    optimizers: list[Any]  # torch optimizers and what else takes a step, such as optim/balance.py
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
    sums: dict[str, Tensor] = field(default_factory=dict)  # `loss`, and the objective's parts, on this rank
    units: Tensor | float = 0.0  # units, over all ranks

    def add(self, taken: Step) -> None:
        """One more step is done. Tensors stay on the device: nothing waits here."""
        self.step += 1
        self.units = self.units + taken.units
        add_sums(self.sums, taken.sums)

    def means(self, engine: Engine) -> dict[str, float]:
        """The sums over all ranks, each divided by the units, since this was last asked. The host waits here."""
        names = sorted(self.sums)
        totals = engine.add(torch.stack([self.sums[name].float() for name in names])).tolist()
        units = max(1.0, float(self.units))
        self.sums, self.units = {}, 0.0
        return {name: total / units for name, total in zip(names, totals, strict=True)}

    def state(self, engine: Engine) -> dict[str, Any]:
        """JSON values, the same on every rank."""
        names = sorted(self.sums)
        totals = engine.add(torch.stack([self.sums[name].float() for name in names])).tolist() if names else []
        return {"step": self.step, "sums": dict(zip(names, totals, strict=True)), "units": float(self.units)}

    @classmethod
    def restore(cls, state: dict[str, Any], engine: Engine) -> Progress:
        """What was summed over ranks goes on in rank 0."""
        share = 1.0 if engine.rank == 0 else 0.0
        sums = {name: torch.tensor(total * share, device=engine.device) for name, total in state["sums"].items()}
        return cls(state["step"], sums, state["units"])


@dataclass(frozen=True, slots=True)
class Step:
    """What an optimizer step came to: this rank's sums and tokens, all ranks' units, the norm of the gradients."""

    sums: dict[str, Tensor]
    units: Tensor
    norm: Tensor
    tokens: int


def add_sums(into: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, value in more.items():
        into[name] = into[name] + value if name in into else value


class Stopped(Exception):
    """A signal ended the run at the edge of a step, after a checkpoint. `exit_code` is 128 + signal."""

    def __init__(self, number: int, step: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; the same command continues")


def step(parts: Parts, index: int) -> Step:
    """One optimizer step."""
    batches = []
    for _ in range(parts.accumulate):
        with parts.meter.waiting_for_data():
            batches.append(next(parts.source))
    units = parts.engine.add(torch.stack([parts.objective.weight(batch) for batch in batches]).sum())
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        with parts.engine.micro_step(last=number == len(batches)):
            loss = parts.objective(parts.model, batch)
            # Sums over the global number of units: exact for ragged micro-batches and ranks alike.
            parts.engine.backward(loss.total / units.clamp(min=1))
        add_sums(sums, {"loss": loss.total.detach(), **loss.parts})
    norm = parts.engine.clip(parts.clip_norm)
    factor = parts.schedule.factor(index, parts.num_steps)
    for optimizer in parts.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Step(sums, units, norm, sum(batch.num_tokens for batch in batches))


def train(parts: Parts, progress: Progress) -> dict[str, float]:
    """Take the steps that are left; log, validate, sample and save as due. Returns the last validation's figures.

    Raises Stopped after a signal, with everything saved; UserError when the loss is no longer a number.
    """
    figures: dict[str, float] = {}
    with _Signals() as signals:
        while progress.step < parts.num_steps:
            with parts.meter.step(parts.engine.world) as counted:
                taken = step(parts, progress.step)
                counted.tokens = taken.tokens
                progress.add(taken)
                log_now = _due(progress.step, parts.log_every, parts.num_steps)
                figures_now = _step_figures(parts, progress, taken.norm) if log_now else {}
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
    figures = progress.means(parts.engine)
    loss = figures.pop("loss")
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss} at step {progress.step}",
            next_step="Lower optimizer.learning_rate or lengthen schedule.warmup_fraction; checkpoints are whole.",
        )
    rate = max(group["lr"] for optimizer in parts.optimizers for group in optimizer.param_groups)
    figures |= {"learning_rate": rate, "gradient_norm": float(norm)}
    for optimizer in parts.optimizers:
        figures |= getattr(optimizer, "figures", dict)()
    return figures


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
