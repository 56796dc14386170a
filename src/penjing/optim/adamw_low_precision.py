"""AdamW whose moments are kept in less than float32 (torch's own keeps them in the weights' dtype)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penjing.optim.low_precision_state import LowPrecisionOptimizer, StateDtype, pieces


class LowPrecisionAdamW(LowPrecisionOptimizer):
    """The formula of `adamw.AdamW`, parameter by parameter. `step` in the state counts the steps that were taken."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
        how: StateDtype,
        seed: int,
    ) -> None:
        """params: groups, each with its `weight_decay`. how: of the moments. seed: of chance in rounding."""
        super().__init__(params, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0}, how, seed)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there, which are freed; a closure is not taken."""
        for part in self.param_groups:
            for parameter in part["params"]:
                if parameter.grad is not None:
                    self._step_one(part, parameter)
                    parameter.grad = None

    def _step_one(self, part: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        chance, state, bad = self.begin(parameter, "exp_avg", "exp_avg_sq"), self.state[parameter], self.bad
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["step"] += 1 if bad is None else 1 - bad.to(state["step"].dtype).reshape(())
        beta1, beta2 = part["betas"]
        # Where the first step is a bad one the count is 0 and 1 - beta^0 as well: nothing is to be divided by it.
        steps = state["step"].clamp(min=1)
        first_correction, second_correction = 1 - beta1**steps, (1 - beta2**steps).sqrt()
        decay: float | Tensor = 1 - part["lr"] * part["weight_decay"]
        if bad is not None:
            decay = torch.where(bad > 0, 1.0, decay)
        weight_N, gradient_N = parameter.view(-1), parameter.grad.reshape(-1)
        for piece in pieces(parameter.numel()):
            first = self.recall(parameter, "exp_avg", piece, signed=True)
            second = self.recall(parameter, "exp_avg_sq", piece, signed=False)
            gradient = gradient_N[piece].float()
            square = gradient.square()
            if bad is not None:  # a mean of a moment with itself is itself
                gradient = torch.where(bad > 0, first, gradient)
                square = torch.where(bad > 0, second, square)
            first.lerp_(gradient, 1 - beta1)
            second.lerp_(square, 1 - beta2)
            update = first / second.sqrt().div_(second_correction).add_(part["eps"])
            update.div_(first_correction)
            if bad is not None:
                update = torch.where(bad > 0, torch.zeros_like(update), update)
            weight_N[piece].mul_(decay).sub_(update, alpha=part["lr"])
            self.keep(parameter, "exp_avg", piece, first, chance, signed=True)
            self.keep(parameter, "exp_avg_sq", piece, second, chance, signed=False)
