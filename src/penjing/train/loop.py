"""The training loop. It knows a model callable, a source of batches, an objective, optimizers, a strategy and trackers.

It has no branch for a stage, a model or a strategy. `step` is one optimizer step; `train` does the work between steps.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.malloc_tuning import gc_frozen
from penjing.loader.batch_source import Source
from penjing.objective.base import Objective
from penjing.optim.schedule import Schedule
from penjing.parallel.base import Strategy
from penjing.track.base import Trackers
from penjing.train.best import BestLoss
from penjing.train.nonfinite_guard import NonFiniteGuard
from penjing.train.oom_recovery import halve_micro_batch, retry_on_oom
from penjing.train.signals import Signals, Stopped
from penjing.train.throughput import Meter


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """All parts of a run. `prepare_run` makes it; tests make smaller ones."""

    strategy: Strategy
    model: Callable[..., Tensor]  # wrapped by the strategy
    objective: Objective
    source: Source
    optimizers: list[Any]  # torch optimizers, and other objects with a `step`, such as optim/router_bias_update.py
    schedule: Schedule
    meter: Meter
    num_steps: int
    accumulate: int  # micro-batches per step on each rank
    max_grad_norm: float
    trackers: Trackers = field(default_factory=lambda: Trackers([]))
    # Between steps; 0 means never.
    log_every: int = 1
    validate_every: int = 0
    sample_every: int = 0
    save_every: int = 0
    validate: Callable[[], dict[str, float]] = dict
    sample: Callable[[int], None] = lambda step: None
    # Saves a checkpoint of (state), and waits for the disk if (wait); returns whether it succeeded.
    save: Callable[[dict[str, Any], bool], bool] = lambda state, wait: True
    roll_back: Callable[[], dict[str, Any] | None] = lambda: None  # loads the last checkpoint, except the data position
    guard: NonFiniteGuard = field(default_factory=NonFiniteGuard)
    best: BestLoss = field(default_factory=BestLoss)
    extra_metrics: Sequence[Callable[[], dict[str, float]]] = ()  # further metrics of a logged step
    # Called with the number of completed steps and the longest expected time until the next call; 0 s: unlimited.
    report_progress: Callable[[int, float], None] = lambda step, longest_seconds: None


@dataclass
class TrainState:
    """A run's progress, with the sums since the last logged step. Saved in every checkpoint."""

    step: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)  # `total`, and the objective's parts, on this rank
    units: Tensor | float = 0.0  # units, over all ranks

    def add(self, taken: Step) -> None:
        """Count a completed step; a bad one adds nothing to the sums. Tensors stay on the device, without a wait."""
        self.step += 1
        good = taken.bad == 0
        self.units = self.units + torch.where(good, taken.units, torch.zeros_like(taken.units))
        add_sums(self.sums, {name: torch.where(good, sum, torch.zeros_like(sum)) for name, sum in taken.sums.items()})

    def means(self, strategy: Strategy) -> dict[str, float]:
        """The sums since the last call over all ranks, each divided by the units. The host waits for the device.

        Empty if all steps since then were bad.
        """
        totals, units = self._totals(strategy), float(self.units)
        self.sums, self.units = {}, 0.0
        return {name: total / max(1.0, units) for name, total in totals.items()} if units else {}

    def _totals(self, strategy: Strategy) -> dict[str, float]:
        names = sorted(self.sums)
        totals = strategy.all_reduce(torch.stack([self.sums[name].float() for name in names])).tolist() if names else []
        return dict(zip(names, totals, strict=True))

    def state(self, strategy: Strategy) -> dict[str, Any]:
        """JSON values, the same on every rank."""
        return {"step": self.step, "sums": self._totals(strategy), "units": float(self.units)}

    def restore(self, state: dict[str, Any], strategy: Strategy) -> None:
        """Restore a checkpoint's progress. Rank 0 gets the sums of all ranks."""
        share = 1.0 if strategy.rank == 0 else 0.0
        self.step, self.units = state["step"], state["units"]
        self.sums = {name: torch.tensor(total * share, device=strategy.device) for name, total in state["sums"].items()}


@dataclass(frozen=True, slots=True)
class Step:
    """The result of an optimizer step: this rank's sums and tokens, all ranks' units and loss, the gradients' norm."""

    sums: dict[str, Tensor]
    units: Tensor
    loss: Tensor  # per unit
    norm: Tensor
    bad: Tensor  # 1.0 if loss or gradients were not finite and nothing was learned, else 0.0
    tokens: int
    samples: Callable[[], dict[str, Any]]  # the step's samples, for a record of an incident


def add_sums(totals: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add `more` to `totals`, which holds copies: the next replay of a device graph may overwrite a pass's metrics."""
    for name, value in more.items():
        totals[name] = totals[name] + value if name in totals else value.clone()


def step(context: TrainingContext, index: int) -> Step:
    """One optimizer step, in smaller passes if memory runs out. Nothing changes if its gradients are not finite."""
    source, before = context.source, context.source.position()

    def halve(message: str) -> None:
        for optimizer in context.optimizers:
            optimizer.zero_grad(set_to_none=True)
        halve_micro_batch(source, before, message, context.strategy.world)
        context.guard.record({"step": index + 1, "kind": "out of memory", "micro_size": source.micro_size})

    sums, units, tokens = retry_on_oom(lambda: _gradients(context), halve)
    after = source.position()
    factor = context.schedule.factor(index, context.num_steps)
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    loss = context.strategy.all_reduce(sums["total"]) / units.clamp(min=1)
    norm, bad = context.strategy.step(context.optimizers, context.max_grad_norm, loss)
    return Step(sums, units, loss, norm, bad, tokens, lambda: source.samples(before, after))


def _gradients(context: TrainingContext) -> tuple[dict[str, Tensor], Tensor, int]:
    """The gradients of one step's batches: (this rank's sums, all ranks' units, this rank's tokens)."""
    batches = []
    for _ in range(math.ceil(context.accumulate * context.source.split)):  # whole but in the probe's short steps
        with context.meter.waiting_for_data():
            batches.append(next(context.source))
    units = context.strategy.all_reduce(torch.stack([context.objective.weight(batch) for batch in batches]).sum())
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        with context.strategy.micro_step(last=number == len(batches)):
            loss = context.objective(context.model, batch)
            # Sums divided by the global number of units: exact also for ragged micro-batches and ranks.
            context.strategy.backward(loss.total / units.clamp(min=1))
        add_sums(sums, {"total": loss.total.detach(), **loss.parts})
    return sums, units, sum(batch.num_tokens for batch in batches)


def train(context: TrainingContext, state: TrainState) -> dict[str, float]:
    """Take the remaining steps; log, validate, sample and save when due. Returns the last validation's metrics.

    Raises Stopped after a signal, with everything saved; UserError if the loss is not finite after rolling back.
    """
    metrics: dict[str, float] = {}
    alone = context.strategy.world == 1
    save_deferred, saved = False, True  # a save was due at a bad step; the last save succeeded
    with gc_frozen(), Signals(alone=alone) as signals:
        while state.step < context.num_steps and not context.best.stopped:
            context.report_progress(state.step, context.meter.longest_seconds)
            with context.meter.step(context.strategy.world):
                taken = step(context, state.step)
                context.meter.count(taken.tokens)
                state.add(taken)
                verdict = context.guard.observe(state.step, taken.bad, taken.loss, taken.norm, taken.samples)
                log_now = _due(state.step, context.log_every, context.num_steps)
                step_metrics = _step_metrics(context, state, taken.norm) if log_now else {}
            if verdict == "roll back":
                _roll_back(context, state)
                continue
            if log_now:
                speed = context.meter.interval(context.num_steps - state.step)
                context.trackers.log(state.step, {**step_metrics, **speed})
            save_now = _due(state.step, context.save_every, context.num_steps)
            hurry = alone and signals.received is not None
            if _due(state.step, context.validate_every, context.num_steps) and not hurry:
                metrics = {}  # those of earlier weights are not returned if this validation is interrupted
                with _between(context, state, "validation"), signals.interruptible(alone):
                    metrics = context.validate()
                if metrics:
                    context.trackers.log(state.step, {"tokens": context.meter.all_tokens(), **metrics})
                    save_now |= context.best.observe(state.step, metrics, save_now, context.guard.last_step_finite)
            if _due(state.step, context.sample_every, context.num_steps) and not hurry:
                with _between(context, state, "sample"), signals.interruptible(alone):
                    context.sample(state.step)
            stop = context.strategy.any(signals.received is not None)
            ends = stop or bool(context.best.stopped) or state.step == context.num_steps
            if save_deferred or ends or save_now:
                context.guard.flush()
                save_deferred = not (ends or context.guard.last_step_finite)
                if not save_deferred:
                    with _between(context, state, "checkpoint"):
                        saved = context.save(state.state(context.strategy), ends)
            if stop:
                raise Stopped(signals.received or signal.SIGTERM, state.step, saved=saved)
    if not saved:
        hint = "Free disk space; the same command repeats the steps since the last one."
        raise UserError("the disk refused the last checkpoint", where=f"step {state.step}", next_step=hint)
    return metrics


def _between(context: TrainingContext, state: TrainState, name: str) -> AbstractContextManager[None]:
    """Context of work between steps, which is timed as `name` and may take any time."""
    context.report_progress(state.step, 0.0)
    return context.meter.share(name)


def _roll_back(context: TrainingContext, state: TrainState) -> None:
    """Go back to the last checkpoint's weights, but not in the data: samples since then are skipped."""
    context.report_progress(state.step, 0.0)
    saved = context.roll_back()
    context.guard.rolled_back(state.step, None if saved is None else saved["step"])
    assert saved is not None
    state.restore(saved, context.strategy)
    context.trackers.rewind(state.step)


def _due(step: int, every: int, num_steps: int) -> bool:
    """Every `every` steps and at the last; 0 means never."""
    return every > 0 and (step % every == 0 or step == num_steps)


def _step_metrics(context: TrainingContext, state: TrainState, norm: Tensor) -> dict[str, float]:
    """Metrics since the last logged step. The only place where the host waits for the device."""
    metrics = state.means(context.strategy)
    metrics.pop("total", None)
    rate = max(group["lr"] for optimizer in context.optimizers for group in optimizer.param_groups)
    metrics |= {"learning_rate": rate, "grad_norm": float(norm)}
    if context.guard.num_bad:
        metrics["skipped_steps"] = context.guard.num_bad
    for extra in context.extra_metrics:
        metrics |= extra()
    return metrics
