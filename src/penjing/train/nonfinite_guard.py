"""Skips steps with a NaN or Inf loss or gradient; a skipped step changes nothing.

All ranks decide alike: the norm is that of gradients summed over ranks, and the loss is summed over ranks too (a mask
can hide a NaN or Inf loss from the gradients).

On a GPU the flag stays on the device: torch's fused optimizers take it as `found_inf` and then leave weights, moments
and step counts unchanged, bit for bit. The host reads it one step later, without waiting, to record and count
incidents. Optimizers that do not take the flag cost one wait per step; on a CPU nothing waits. (Undoing bad steps
instead would need a copy of weights and moments.)
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penjing import devices
from penjing.base.errors import UserError
from penjing.parallel.grad_scaler import LossScaler

IN_A_ROW = 3  # bad steps in a row after which the run rolls back: the weights are suspected, not the data
ROLLBACKS = 3  # most rollbacks in one run
WINDOW = 64  # recent losses that a new loss is compared with
MIN_LOSSES = 16  # recent losses that are needed to detect a spike
DEVIATIONS = 10.0  # distance above the recent losses, in their spreads, at which a loss is a spike
Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose values are on their way from the device to the host."""

    step: int
    values_4: Tensor  # bad, excused, loss per unit, norm
    samples: Callable[[], dict[str, Any]]  # the step's samples
    ready: Any  # an event of the device, or None


class NonFiniteGuard:
    """Checks every step on the host: records bad steps and loss spikes with their samples, and decides when to roll
    back to the last checkpoint."""

    def __init__(self, record: Record = lambda incident: None, scaler: LossScaler | None = None) -> None:
        """scaler: of the loss, if any; overflowing gradients are excused while it searches for its scale."""
        self.record, self.scaler = record, scaler
        self.num_bad = 0  # in the whole run
        self.in_a_row = 0
        self.rollbacks = 0
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._waiting: deque[PendingStep] = deque()

    @property
    def last_step_finite(self) -> bool:
        """Whether the last step was finite, once it is known. Otherwise no checkpoint is saved."""
        self.flush()
        return self.in_a_row == 0

    def observe(
        self, step: int, bad: Tensor, loss: Tensor, norm: Tensor, samples: Callable[[], dict[str, Any]]
    ) -> Literal["go on", "roll back"]:
        """bad, loss (per unit, over all ranks), norm: of the last step, still on the device."""
        excused = bad.bool() & torch.isfinite(loss) & self.scaler.can_halve() if self.scaler else torch.zeros_like(bad)
        values_4 = torch.stack([bad.float(), excused.float(), loss.detach().float(), norm.detach().float()])
        values_4, ready = devices.of(values_4.device).send_to_host(values_4)
        self._waiting.append(PendingStep(step, values_4, samples, ready))
        while len(self._waiting) > (0 if ready is None else 1):
            self._flush_one()
        return "roll back" if self.in_a_row >= IN_A_ROW else "go on"

    def flush(self) -> None:
        """Process all pending steps. Called before a checkpoint, so that its state is complete."""
        while self._waiting:
            self._flush_one()

    def _flush_one(self) -> None:
        pending = self._waiting.popleft()
        if pending.ready is not None:
            pending.ready.synchronize()
        bad, excused, loss, norm = pending.values_4.tolist()
        if excused:
            return
        about = {"step": pending.step, "loss": loss, "grad_norm": norm}
        if bad:
            self.num_bad += 1
            self.in_a_row += 1
            self.record({**about, "kind": "not finite", "in_a_row": self.in_a_row, **pending.samples()})
            return
        self.in_a_row = 0
        if is_spike(loss, self._recent):
            usual = statistics.median(self._recent)
            self.record({**about, "kind": "spike", "usual_loss": usual, **pending.samples()})
        self._recent.append(loss)

    def rolled_back(self, step: int, to: int | None) -> None:
        """Record a rollback to the checkpoint of step `to`. Raises UserError if there is none or after too many."""
        self.flush()
        if to is None or self.rollbacks >= ROLLBACKS:
            tried = f" after {self.rollbacks} rollbacks to a checkpoint" if self.rollbacks else ""
            what = f"loss or gradients were not finite in {self.in_a_row} steps in a row, up to step {step}{tried}"
            hint = "Lower optimizer.learning_rate or raise schedule.warmup_ratio; checkpoints are intact."
            raise UserError(what, where="incidents.jsonl names the samples", next_step=hint)
        self.rollbacks += 1
        self.in_a_row = 0
        self._recent.clear()
        self.record({"step": step, "kind": "rolled back", "to": to, "times": self.rollbacks})

    def state(self) -> dict[str, Any]:
        self.flush()
        counts = {name: getattr(self, name) for name in ("num_bad", "in_a_row", "rollbacks")}
        return {**counts, "recent": list(self._recent)}

    def restore(self, state: dict[str, Any]) -> None:
        self.num_bad, self.in_a_row, self.rollbacks = state["num_bad"], state["in_a_row"], state["rollbacks"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._waiting.clear()


def is_spike(loss: float, recent: Sequence[float] | deque[float]) -> bool:
    """Whether a loss is above the recent median by more than 10 times their spread and by more than half the median.

    Spread: 1.4826 times the median absolute deviation, which for normal values is the standard deviation. Unlike that,
    it is robust against one earlier spike.
    """
    if len(recent) < MIN_LOSSES or not math.isfinite(loss):
        return False
    middle = statistics.median(recent)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    return loss - middle > max(DEVIATIONS * spread, 0.5 * abs(middle))
