"""AdamW (arXiv:1711.05101): torch's fused kernel for float32 state, our own for state in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from penjing.base.config import BelowOne, NonNegativeFloat, PositiveFloat, Settings
from penjing.optim.adamw_low_precision import LowPrecisionAdamW
from penjing.optim.adamw_no_dynamo import FusedAdamW
from penjing.optim.low_precision_state import BYTES, StateDtype, uses_low_precision
from penjing.optim.param_groups import embeddings, group_parameters
from penjing.optim.ranks import ONE_RANK, Ranks


@dataclass(frozen=True, kw_only=True)
class AdamW(Settings):
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= rate (m^ / (sqrt(v^) + eps) + decay w)."""

    section: ClassVar = "optimizer"

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 5e-4  # peak
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
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
        optimizers.append(LowPrecisionAdamW(groups, learning_rate, betas, eps, state_dtype, seed))
    return optimizers


def _with_peak(param_groups: GroupList, learning_rate: float) -> GroupList:
    """The groups that are not empty (torch refuses empty ones), each with `peak`."""
    return [{**group, "peak": learning_rate} for group in param_groups if group["params"]]
