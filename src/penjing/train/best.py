"""A run's lowest held-out loss: which checkpoint is kept for it, and when to stop early."""

import math
from collections.abc import Mapping
from typing import Any

from penjing.train.config import Run
from penjing.train.nonfinite_guard import Record

CLEARLY = 0.01  # a held-out loss so far above the lowest, relative to it, is named once


class BestLoss:
    """Follows the held-out losses; its state is in every checkpoint. The best one that is saved is `kept`: in the first
    epoch, in which a run cannot overfit, of the steps that are saved anyway; later, or with a patience, of all."""

    def __init__(self, run: Run | None = None, epoch_steps: int = 0, record: Record = lambda incident: None) -> None:
        """run: its settings; None: follows nothing. epoch_steps: of the first epoch."""
        self.metric = run.objective.best_metric if run else ""
        self.patience = run.eval.patience if run else 0
        self.keeps = bool(run and run.checkpoint.best)
        self._measure = f"{self.metric} {run.eval.sequences} {run.data.validation}" if run else ""
        self._saves_from, self._record = 0 if self.patience else epoch_steps, record
        self.kept: dict[str, Any] = {}  # its `step`, `loss` and all `figures` of that validation
        self.step, self.lowest = 0, math.inf
        self.last: float | None = None  # None: NaN or Inf
        self.since = 0  # validations since the lowest
        self._named = False  # that the loss rises

    @property
    def stopped(self) -> str:
        """Why the run stops early, a line for the user; empty: it goes on."""
        why = f"stopped early: {self.since} validations without a new best; eval.patience=0 continues it"
        return why if 0 < self.patience <= self.since else ""

    def observe(self, step: int, figures: Mapping[str, float], due: bool, finite: bool = True) -> bool:
        """Take in a validation; whether this step is the new best and gets a checkpoint. due: it gets one anyway.
        finite: whether its loss and gradients were; else it gets none. A held-out loss that is NaN is a bad one."""
        if self.metric not in figures:
            return False
        loss = figures[self.metric] if math.isfinite(figures[self.metric]) else math.inf
        self.last, self.since = loss if loss < math.inf else None, self.since + 1
        if loss < self.lowest:
            self.step, self.lowest, self.since = step, loss, 0
        elif loss - self.lowest > CLEARLY * abs(self.lowest) and not self._named:
            self._named = True
            name = f"held-out {self.metric.removeprefix('val_').replace('_', ' ')}"
            above = f"{name} {loss:.3f} is {loss - self.lowest:.3f} above its best, {self.lowest:.3f}"
            hint = "" if self.patience else "; eval.patience=N stops such a run"
            kept = f", which is kept{hint}" if self.kept.get("step") == self.step else ""
            self._record({"step": step, "kind": "held-out loss rises", "note": f"{above} at step {self.step}{kept}"})
        is_saved = finite and (due or step >= self._saves_from)
        if not self.keeps or not is_saved or loss >= self.kept.get("loss", math.inf):
            return False
        known = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
        self.kept = {"step": step, "loss": loss, "figures": known}
        return True

    def state(self) -> dict[str, Any]:
        names = ("kept", "step", "lowest", "last", "since", "_measure", "_named")
        return {name: getattr(self, name) for name in names} if math.isfinite(self.lowest) else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Losses on other texts are no measure for those to come."""
        if state.get("_measure") == self._measure:
            vars(self).update(state)
