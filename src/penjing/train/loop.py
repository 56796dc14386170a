"""The loop. It knows a model callable, a source of batches, an objective, optimizers, a strategy and trackers.

It has no branch for a stage, a model or a strategy: what a step is stands in `step`, what happens between in `train`.
"""

from __future__ import annotations

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
from penjing.train.nonfinite_guard import NonFiniteGuard, guarded_step
from penjing.train.oom_recovery import halve_micro_batch, retry_on_oom
from penjing.train.signals import Signals, Stopped
from penjing.train.throughput import Meter


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """Everything one run is made of. `prepare_run` makes it; tests make smaller ones."""

    strategy: Strategy
    model: Callable[..., Tensor]  # wrapped by the strategy
    objective: Objective
    source: Source
    optimizers: list[Any]  # torch optimizers and what else takes a step, such as optim/router_bias_update.py
    schedule: Schedule
    trackers: Trackers
    meter: Meter
    num_steps: int
    accumulate: int  # micro-batches per step on each rank
    max_grad_norm: float
    # Between steps; 0 means never.
    log_every: int = 1
    validate_every: int = 0
    sample_every: int = 0
    save_every: int = 0
    validate: Callable[[], dict[str, float]] = dict
    sample: Callable[[int], None] = lambda step: None
    # Makes the state durable, waiting for it if told to; says whether it is.
    save: Callable[[dict[str, Any], bool], bool] = lambda state, wait: True
    go_back: Callable[[], dict[str, Any] | None] = lambda: None  # loads the last checkpoint but for the place in data
    guard: NonFiniteGuard = field(default_factory=NonFiniteGuard)
    figures: Sequence[Callable[[], dict[str, float]]] = ()  # further ones of a logged step
    # Told how many steps are done, and for how long at most the next may take; 0 s: what comes may take any time.
    at_edge: Callable[[int, float], None] = lambda step, longest_seconds: None


@dataclass
class TrainState:
    """How far a run is, with what is summed since the last logged step. Saved with every checkpoint."""

    step: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)  # `total`, and the objective's parts, on this rank
    units: Tensor | float = 0.0  # units, over all ranks

    def add(self, taken: Step) -> None:
        """One more step is done; of a bad one nothing is summed. Tensors stay on the device: nothing waits here."""
        self.step += 1
        good = taken.bad == 0
        self.units = self.units + torch.where(good, taken.units, torch.zeros_like(taken.units))
        add_sums(self.sums, {name: torch.where(good, sum, torch.zeros_like(sum)) for name, sum in taken.sums.items()})

    def means(self, strategy: Strategy) -> dict[str, float]:
        """The sums over all ranks, each divided by the units, since this was last asked. The host waits here.

        Empty where all steps since then were bad.
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
        """Become the progress of a checkpoint. What was summed over ranks goes on in rank 0."""
        share = 1.0 if strategy.rank == 0 else 0.0
        self.step, self.units = state["step"], state["units"]
        self.sums = {name: torch.tensor(total * share, device=strategy.device) for name, total in state["sums"].items()}


@dataclass(frozen=True, slots=True)
class Step:
    """What an optimizer step came to: this rank's sums and tokens, all ranks' units and loss, the gradients' norm."""

    sums: dict[str, Tensor]
    units: Tensor
    loss: Tensor  # per unit
    norm: Tensor
    bad: Tensor  # 1.0 where loss or gradients were not finite and nothing was learned, else 0.0
    tokens: int
    samples: Callable[[], dict[str, Any]]  # what it was made of, for a step worth writing down


def add_sums(into: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """What is kept is a copy: a pass's figures may stand where a CUDA graph's next replay writes its own."""
    for name, value in more.items():
        into[name] = into[name] + value if name in into else value.clone()


def step(context: TrainingContext, index: int) -> Step:
    """One optimizer step, in smaller passes if memory does not suffice. Nothing changes if its gradients are bad."""
    source, before = context.source, context.source.position()

    def halve(message: str) -> None:
        for optimizer in context.optimizers:
            optimizer.zero_grad(set_to_none=True)
        halve_micro_batch(source, before, message, context.strategy.world)
        context.guard.record({"step": index + 1, "kind": "out of memory", "micro_size": source.micro_size})

    sums, units, tokens = retry_on_oom(lambda: _gradients(context), halve)
    after = source.position()
    norm = context.strategy.clip(context.max_grad_norm)
    factor = context.schedule.factor(index, context.num_steps)
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    loss = context.strategy.all_reduce(sums["total"]) / units.clamp(min=1)
    bad = guarded_step(context.optimizers, norm, loss)
    return Step(sums, units, loss, norm, bad, tokens, lambda: source.samples(before, after))


def _gradients(context: TrainingContext) -> tuple[dict[str, Tensor], Tensor, int]:
    """The gradients of one step's batches: (this rank's sums, all ranks' units, this rank's tokens)."""
    batches = []
    for _ in range(context.accumulate * context.source.split):
        with context.meter.waiting_for_data():
            batches.append(next(context.source))
    units = context.strategy.all_reduce(torch.stack([context.objective.weight(batch) for batch in batches]).sum())
    sums: dict[str, Tensor] = {}
    for number, batch in enumerate(batches, start=1):
        with context.strategy.micro_step(last=number == len(batches)):
            loss = context.objective(context.model, batch)
            # Sums over the global number of units: exact for ragged micro-batches and ranks alike.
            context.strategy.backward(loss.total / units.clamp(min=1))
        add_sums(sums, {"total": loss.total.detach(), **loss.parts})
    return sums, units, sum(batch.num_tokens for batch in batches)


def train(context: TrainingContext, state: TrainState) -> dict[str, float]:
    """Take the steps that are left; log, validate, sample and save as due. Returns what the last validation found.

    Raises Stopped after a signal, with everything saved; UserError when going back does not make the loss a number.
    """
    figures: dict[str, float] = {}
    alone = context.strategy.world == 1
    put_off, saved = False, True  # a checkpoint that was due at a bad step; whether the last one is on the disk
    with gc_frozen(), Signals() as signals:
        while state.step < context.num_steps:
            context.at_edge(state.step, context.meter.longest_seconds)
            with context.meter.step(context.strategy.world):
                taken = step(context, state.step)
                context.meter.count(taken.tokens)
                state.add(taken)
                verdict = context.guard.observe(state.step, taken.bad, taken.loss, taken.norm, taken.samples)
                log_now = _due(state.step, context.log_every, context.num_steps)
                figures_now = _step_figures(context, state, taken.norm) if log_now else {}
            if verdict == "roll back":
                _go_back(context, state)
                continue
            if log_now:
                speed = context.meter.interval(context.num_steps - state.step)
                context.trackers.log(state.step, {**figures_now, **speed})
            hurry = alone and signals.received is not None
            if _due(state.step, context.validate_every, context.num_steps) and not hurry:
                figures = {}  # of earlier weights: they do not stand for these
                with _between(context, state, "validation"), signals.cuts_short(alone):
                    figures = context.validate()
                if figures:
                    context.trackers.log(state.step, {"tokens": context.meter.all_tokens(), **figures})
            if _due(state.step, context.sample_every, context.num_steps) and not hurry:
                with _between(context, state, "sample"), signals.cuts_short(alone):
                    context.sample(state.step)
            stop = context.strategy.any(signals.received is not None)
            ends = stop or state.step == context.num_steps
            if put_off or ends or _due(state.step, context.save_every, context.num_steps):
                context.guard.flush()
                put_off = not (ends or context.guard.calm)
                if not put_off:
                    with _between(context, state, "checkpoint"):
                        saved = context.save(state.state(context.strategy), ends)
            if stop:
                raise Stopped(signals.received or signal.SIGTERM, state.step, saved=saved)
    if not saved:
        raise UserError(
            "the disk refused the last checkpoint",
            where=f"step {state.step}",
            next_step="Free disk space; the same command repeats the steps since the last one.",
        )
    return figures


def _between(context: TrainingContext, state: TrainState, name: str) -> AbstractContextManager[None]:
    """Around work between steps, which is timed as `name` and may take any time."""
    context.at_edge(state.step, 0.0)
    return context.meter.share(name)


def _go_back(context: TrainingContext, state: TrainState) -> None:
    """To the last checkpoint's weights, with the samples that come next: those in between are skipped."""
    context.at_edge(state.step, 0.0)
    saved = context.go_back()
    context.guard.rolled_back(state.step, None if saved is None else saved["step"])
    assert saved is not None
    state.restore(saved, context.strategy)
    context.trackers.rewind(state.step)


def _due(step: int, every: int, num_steps: int) -> bool:
    """Every `every` steps and at the last; 0 means never."""
    return every > 0 and (step % every == 0 or step == num_steps)


def _step_figures(context: TrainingContext, state: TrainState, norm: Tensor) -> dict[str, float]:
    """Figures since the last logged step. The one place where the host waits for the device."""
    figures = state.means(context.strategy)
    figures.pop("total", None)
    rate = max(group["lr"] for optimizer in context.optimizers for group in optimizer.param_groups)
    figures |= {"learning_rate": rate, "grad_norm": float(norm)}
    if context.guard.num_bad:
        figures["skipped_steps"] = context.guard.num_bad
    for more in context.figures:
        figures |= more()
    return figures
