"""AdamW (arXiv:1711.05101): torch's fused kernel for float32 state, our own for state in fewer bits."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing.base.config import BelowOne, NonNegativeFloat, PositiveFloat, Settings
from penjing.devices.shards import local_part
from penjing.optim.adamw_no_dynamo import FusedAdamW
from penjing.optim.low_precision_state import BYTES, LowPrecisionOptimizer, StateDtype, chunks, uses_low_precision
from penjing.optim.param_groups import embeddings, group_parameters
from penjing.optim.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, kw_only=True)
class AdamW(Settings, section="optimizer"):
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= rate (m^ / (sqrt(v^) + eps) + decay w)."""

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 5e-4  # peak
    beta1: BelowOne = 0.9  # decay of the mean of gradients
    beta2: BelowOne = 0.95  # decay of the mean of squared gradients
    eps: PositiveFloat = 1e-8  # added to the denominator
    weight_decay: NonNegativeFloat = 0.1  # of block matrices only; gains, embedding and head do not decay
    # Format of both moments between steps: 8, 4 or 2 bytes per parameter. bfloat16 uses stochastic rounding. int8 has
    # a scale for every 256 numbers and keeps the embedding in float32. Parameters below 4096 elements stay float32.
    state_dtype: StateDtype = "float32"

    @property
    def state_bytes(self) -> int:
        """Bytes of state per parameter, approximately."""
        return 2 * BYTES[self.state_dtype]

    def warnings(self) -> list[str]:
        """Warnings about settings that are probably mistakes."""
        return []

    def build(self, model: nn.Module, seed: int = 0, ranks: Ranks = ONE_RANK) -> list[torch.optim.Optimizer]:
        """seed: of stochastic rounding. ranks: unused; the work is small."""
        groups = group_parameters(model)
        param_groups: list[dict[str, Any]] = [
            {"params": groups.matrices, "weight_decay": self.weight_decay},
            {"params": groups.tables + groups.gains, "weight_decay": 0.0},
        ]
        betas = (self.beta1, self.beta2)
        return adamw(param_groups, embeddings(model), self.learning_rate, betas, self.eps, self.state_dtype, seed)


GroupList = list[dict[str, Any]]  # parameter groups


def split_groups(groups: GroupList, dtype: StateDtype, embeddings: set[nn.Parameter]) -> tuple[GroupList, GroupList]:
    """The groups split in two: parameters with float32 state, and those with state in `dtype`."""
    low = {p for group in groups for p in group["params"] if uses_low_precision(p, dtype, embedding=p in embeddings)}
    return (
        [{**group, "params": [p for p in group["params"] if p not in low]} for group in groups],
        [{**group, "params": [p for p in group["params"] if p in low]} for group in groups],
    )


def adamw(
    param_groups: GroupList,
    embeddings: set[nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    state_dtype: StateDtype,
    seed: int,
) -> list[torch.optim.Optimizer]:
    """torch's AdamW for float32 state and ours for low-precision state, each only if it has parameters. Each parameter
    group stores its peak learning rate as `peak`."""
    optimizers: list[torch.optim.Optimizer] = []
    full, low = split_groups(param_groups, state_dtype, embeddings)
    if groups := _with_peak(full, learning_rate):
        optimizers.append(FusedAdamW(groups, learning_rate, betas, eps))
    if groups := _with_peak(low, learning_rate):
        defaults = {"lr": learning_rate, "betas": betas, "eps": eps}
        optimizers.append(LowPrecisionAdamW(groups, defaults, state_dtype, seed))
    return optimizers


def _with_peak(param_groups: GroupList, learning_rate: float) -> GroupList:
    """The groups that are not empty (torch refuses empty ones), each with `peak`."""
    return [{**group, "peak": learning_rate} for group in param_groups if group["params"]]


class LowPrecisionAdamW(LowPrecisionOptimizer):
    """The formula of `AdamW`, parameter by parameter. `step` in the state counts steps, without skipped ones. Its
    defaults are `lr`, `betas` and `eps`; each group has a `weight_decay`."""

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
        weight_N, gradient_N = local_part(parameter).view(-1), local_part(parameter.grad).reshape(-1)
        for chunk in chunks(len(weight_N)):
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
