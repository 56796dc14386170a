"""Steps that must not be learned from: a NaN or Inf loss or gradient skips the step and changes nothing.

Every rank decides alike: the gradients' norm is that of their sum over ranks, and the loss is summed over ranks too (a
NaN or Inf loss need not show in the gradients: a mask may hide it).

On a GPU the flag stays there: torch's fused optimizers take it as `found_inf` and then leave weights, moments and step
counts as they were, bit for bit. The host looks at it one step late, when it is there without waiting, and only to
write down what happened and to count. Optimizers that do not take the flag cost one wait a step; on a CPU there is
nothing to wait for. (The other way, undoing a step when it is found to be bad, needs a copy of weights and moments.)
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.parallel.grad_scaler import LossScaler

IN_A_ROW = 3  # bad steps, after which the weights are suspected and not the data
ROLLBACKS = 3  # at most, in one run
WINDOW = 64  # recent losses that a new one is compared with
FEWEST = 16  # of them, before anything counts as a spike
DEVIATIONS = 10.0  # of the recent losses' spread, above which a loss is a spike
Record = Callable[[dict[str, Any]], None]


def guarded_step(optimizers: Sequence[Any], norm: Tensor, loss: Tensor) -> Tensor:
    """Take the optimizers' step, unless norm or loss (of all ranks) is not finite; returns 1.0 if so, else 0.0."""
    bad = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    masked = norm.device.type == "cuda" and all(takes_flag(optimizer) for optimizer in optimizers)
    left_out = not masked and bool(bad)
    for optimizer in optimizers:
        if masked:
            optimizer.found_inf, optimizer.grad_scale = bad, None
        if not left_out:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return bad


def takes_flag(optimizer: Any) -> bool:
    """Whether an optimizer leaves everything as it is where its `found_inf` is 1 (torch's convention for scalers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@dataclass(frozen=True, slots=True)
class PendingStep:
    """One step, on its way from the device to the host."""

    step: int
    figures_4: Tensor  # bad, excused, loss per unit, norm
    samples: Callable[[], dict[str, Any]]  # which samples the step was made of
    ready: Any  # a CUDA event, or None


class NonFiniteGuard:
    """Looks at every step on the host: writes down bad ones and spikes of the loss with their samples, and says when
    to go back to the last checkpoint."""

    def __init__(self, record: Record = lambda incident: None, scaler: LossScaler | None = None) -> None:
        """scaler: of the loss, where there is one; gradients that overflow while it looks for its scale are excused."""
        self.record, self.scaler = record, scaler
        self.num_bad = 0  # in the whole run
        self.in_a_row = 0
        self.rollbacks = 0
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._waiting: deque[PendingStep] = deque()

    @property
    def calm(self) -> bool:
        """Whether the last step was good: only then is a checkpoint one to go back to."""
        return self.in_a_row == 0

    def observe(
        self, step: int, bad: Tensor, loss: Tensor, norm: Tensor, samples: Callable[[], dict[str, Any]]
    ) -> Literal["go on", "roll back"]:
        """bad, loss (per unit, over all ranks), norm: of the step just taken, still on the device."""
        excused = bad.bool() & torch.isfinite(loss) & self.scaler.can_halve() if self.scaler else torch.zeros_like(bad)
        figures_4 = torch.stack([bad.float(), excused.float(), loss.detach().float(), norm.detach().float()])
        ready = None
        if figures_4.device.type == "cuda":
            pinned = torch.empty(4, pin_memory=True)
            figures_4 = pinned.copy_(figures_4, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._waiting.append(PendingStep(step, figures_4, samples, ready))
        while len(self._waiting) > (0 if ready is None else 1):
            self._flush_one()
        return "roll back" if self.in_a_row >= IN_A_ROW else "go on"

    def flush(self) -> None:
        """Look at what is still on its way; before a checkpoint, so that it holds all there is to know."""
        while self._waiting:
            self._flush_one()

    def _flush_one(self) -> None:
        seen = self._waiting.popleft()
        if seen.ready is not None:
            seen.ready.synchronize()
        bad, excused, loss, norm = seen.figures_4.tolist()
        if excused:
            return
        about = {"step": seen.step, "loss": loss, "grad_norm": norm}
        if bad:
            self.num_bad += 1
            self.in_a_row += 1
            self.record({**about, "kind": "not finite", "in_a_row": self.in_a_row, **seen.samples()})
            return
        self.in_a_row = 0
        if is_spike(loss, self._recent):
            usual = statistics.median(self._recent)
            self.record({**about, "kind": "spike", "usual_loss": usual, **seen.samples()})
        self._recent.append(loss)

    def rolled_back(self, step: int, to: int | None) -> None:
        """Note that the run goes back to the checkpoint of step `to`; raises UserError where that makes no sense."""
        self.flush()
        if to is None or self.rollbacks >= ROLLBACKS:
            tried = f" after {self.rollbacks} returns to a checkpoint" if self.rollbacks else ""
            raise UserError(
                f"loss or gradients were not finite in {self.in_a_row} steps in a row, up to step {step}{tried}",
                where="incidents.jsonl names the samples",
                next_step="Lower optimizer.learning_rate or lengthen schedule.warmup_ratio; checkpoints are whole.",
            )
        self.rollbacks += 1
        self.in_a_row = 0
        self._recent.clear()
        self.record({"step": step, "kind": "rolled back", "to": to, "times": self.rollbacks})

    def state(self) -> dict[str, Any]:
        self.flush()
        return {
            "num_bad": self.num_bad,
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
            "recent": list(self._recent),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.num_bad, self.in_a_row, self.rollbacks = state["num_bad"], state["in_a_row"], state["rollbacks"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
        self._waiting.clear()


def is_spike(loss: float, recent: Sequence[float] | deque[float]) -> bool:
    """Whether a loss stands far above the recent ones: by 10 times their spread and by half of their median.

    Spread: 1.4826 times the median distance from the median, the standard deviation of normal values; unlike that, one
    earlier spike does not widen it.
    """
    if len(recent) < FEWEST or not math.isfinite(loss):
        return False
    middle = statistics.median(recent)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    return loss - middle > max(DEVIATIONS * spread, 0.5 * abs(middle))
