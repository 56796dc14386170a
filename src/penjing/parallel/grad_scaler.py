"""Loss scaling for float16, in which small gradients underflow to zero (arXiv:1710.03740, section 3.2).

The loss is multiplied by a scale before the backward pass; the gradients are divided by it afterwards. If a gradient
overflows, the norm is not finite: the step is skipped (train/nonfinite_guard.py) and the scale is halved. After 2,000
finite steps in a row the scale is doubled. Scale and count stay on the device, so the host never waits for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, MAX_SCALE = 2.0**16, 2.0, 0.5, 2.0**24
GROWTH_INTERVAL = 2000  # finite steps in a row


class LossScaler:
    """A strategy's `scaler` for float16 matmuls. Its state is equal on all ranks: gradients are already summed."""

    def __init__(
        self, device: torch.device, *, init_scale: float = INIT_SCALE, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self.growth_interval = growth_interval
        self._scale = torch.tensor(init_scale, device=device)
        self._good_steps = torch.zeros((), device=device)

    def scale_loss(self, total: Tensor) -> Tensor:
        return total * self._scale

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide summed gradients by the scale, in place."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1 / self._scale)

    @torch.no_grad()
    def update(self, norm: Tensor) -> None:
        """Choose the next step's scale from the norm of this step's gradients, before or after unscaling."""
        good = torch.isfinite(norm)
        self._good_steps = torch.where(good, self._good_steps + 1, 0.0)
        grows = self._good_steps >= self.growth_interval
        factor = torch.where(good, torch.where(grows, GROWTH_FACTOR, 1.0), BACKOFF_FACTOR)
        self._scale = (self._scale * factor).clamp(1.0, MAX_SCALE)
        self._good_steps = torch.where(grows, 0.0, self._good_steps)

    def can_halve(self) -> Tensor:
        """Whether the scale can still decrease. If so, an overflow is part of the search for a scale and no error."""
        return self._scale > 1

    def state(self) -> dict[str, Any]:
        """The state as JSON values. The host waits for the device."""
        return {"scale": float(self._scale), "good_steps": float(self._good_steps)}

    def restore(self, state: dict[str, Any]) -> None:
        self._scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": float(self._scale)}
