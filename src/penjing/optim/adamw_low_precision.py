"""AdamW whose moments are stored in fewer bits than float32 (torch's AdamW stores them in the weights' dtype)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penjing.optim.low_precision_state import LowPrecisionOptimizer, StateDtype, chunks


class LowPrecisionAdamW(LowPrecisionOptimizer):
    """The formula of `adamw.AdamW`, parameter by parameter. `step` in the state counts steps, without skipped ones."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: StateDtype,
        seed: int,
    ) -> None:
        """params: groups, each with its `weight_decay`. state_dtype: of the moments. seed: of stochastic rounding."""
        defaults = {"lr": learning_rate, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(params, defaults, state_dtype, seed)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the existing gradients, which are freed. Closures are not supported."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter)
                    parameter.grad = None

    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        generator, state, bad = self.init_state(parameter, "exp_avg", "exp_avg_sq"), self.state[parameter], self.bad
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["step"] += 1 if bad is None else 1 - bad.to(state["step"].dtype).reshape(())
        beta1, beta2 = group["betas"]
        # If the first step is bad, the count is 0 and so is 1 - beta^0; the clamp avoids a division by zero.
        steps = state["step"].clamp(min=1)
        first_correction, second_correction = 1 - beta1**steps, (1 - beta2**steps).sqrt()
        decay: float | Tensor = 1 - group["lr"] * group["weight_decay"]
        if bad is not None:
            decay = torch.where(bad > 0, 1.0, decay)
        weight_N, gradient_N = parameter.view(-1), parameter.grad.reshape(-1)
        for chunk in chunks(parameter.numel()):
            first = self.read_state(parameter, "exp_avg", chunk, signed=True)
            second = self.read_state(parameter, "exp_avg_sq", chunk, signed=False)
            gradient = gradient_N[chunk].float()
            square = gradient.square()
            if bad is not None:  # averaging a moment with itself leaves it unchanged
                gradient = torch.where(bad > 0, first, gradient)
                square = torch.where(bad > 0, second, square)
            first.lerp_(gradient, 1 - beta1)
            second.lerp_(square, 1 - beta2)
            update = first / second.sqrt().div_(second_correction).add_(group["eps"])
            update.div_(first_correction)
            if bad is not None:
                update = torch.where(bad > 0, torch.zeros_like(update), update)
            weight_N[chunk].mul_(decay).sub_(update, alpha=group["lr"])
            self.write_state(parameter, "exp_avg", chunk, first, generator, signed=True)
            self.write_state(parameter, "exp_avg_sq", chunk, second, generator, signed=False)
