"""Loss scaling for float16, whose smallest steps would swallow small gradients (arXiv:1710.03740, section 3.2).

The loss is multiplied by a scale before the backward pass and the gradients are divided by it after. When one of them
overflows the step is left out (train/nonfinite_guard.py: the norm is then not finite) and the scale halved; after 2,000
good steps in a row it is doubled. Scale and count stay on the device: no step waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST, GROWTH, BACKOFF, LARGEST = 2.0**16, 2.0, 0.5, 2.0**24
GROW_AFTER = 2000  # good steps


class LossScaler:
    """Held by a strategy as `scaler` where matmuls are taken in float16. The same on every rank, since gradients are
    summed over ranks before anyone looks."""

    def __init__(self, device: torch.device, *, first: float = FIRST, grow_after: int = GROW_AFTER) -> None:
        self.grow_after = grow_after
        self._scale = torch.tensor(first, device=device)
        self._good_steps = torch.zeros((), device=device)

    def scaled(self, total: Tensor) -> Tensor:
        return total * self._scale

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide summed gradients by the scale, in place."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1 / self._scale)

    @torch.no_grad()
    def observe(self, norm: Tensor) -> None:
        """Choose the next step's scale from the norm of this step's gradients, unscaled or not."""
        good = torch.isfinite(norm)
        self._good_steps = torch.where(good, self._good_steps + 1, 0.0)
        grown = self._good_steps >= self.grow_after
        factor = torch.where(good, torch.where(grown, GROWTH, 1.0), BACKOFF)
        self._scale = (self._scale * factor).clamp(1.0, LARGEST)
        self._good_steps = torch.where(grown, 0.0, self._good_steps)

    def can_fall(self) -> Tensor:
        """Whether the scale can still become smaller: until then an overflow is its search, and no sign of trouble."""
        return self._scale > 1

    def state(self) -> dict[str, Any]:
        """JSON values. The host waits for the device."""
        return {"scale": float(self._scale), "good_steps": float(self._good_steps)}

    def restore(self, state: dict[str, Any]) -> None:
        self._scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])

    def figures(self) -> dict[str, float]:
        return {"loss_scale": float(self._scale)}
