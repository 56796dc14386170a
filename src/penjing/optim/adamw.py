"""AdamW (arXiv:1711.05101): torch's own fused kernel, and ours where its state is kept in less than float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from penjing.base.config import BelowOne, NonNegativeFloat, PositiveFloat, Settings
from penjing.optim.adamw_low_precision import LowPrecisionAdamW
from penjing.optim.adamw_no_dynamo import FusedAdamW
from penjing.optim.low_precision_state import BYTES, StateDtype, is_small
from penjing.optim.param_groups import embeddings, group


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
    # How both moments are kept between steps: 8, 4 or 2 bytes a parameter. bfloat16 is rounded up or down by chance;
    # int8 has a scale for every 256, and leaves the embedding in float32. Both leave what is below 4096 elements.
    state_dtype: StateDtype = "float32"

    @property
    def state_bytes(self) -> int:
        """Of a parameter, about."""
        return 2 * BYTES[self.state_dtype]

    def warnings(self) -> list[str]:
        """What to tell the user about settings that were hardly meant so."""
        return []

    def build(self, model: nn.Module, seed: int = 0) -> list[torch.optim.Optimizer]:
        """seed: of chance in rounding the state."""
        groups = group(model)
        parts: list[dict[str, Any]] = [
            {"params": groups.matrices, "weight_decay": self.weight_decay},
            {"params": groups.tables + groups.gains, "weight_decay": 0.0},
        ]
        betas = (self.beta1, self.beta2)
        return adamw(parts, embeddings(model), self.learning_rate, betas, self.eps, self.state_dtype, seed)


Parts = list[dict[str, Any]]  # parameter groups


def split(parts: Parts, how: StateDtype, tables: set[nn.Parameter]) -> tuple[Parts, Parts]:
    """The same groups twice: with what is kept in float32, and with what is kept as `how` says. tables: embeddings."""
    small = {p for part in parts for p in part["params"] if is_small(p, how, embedding=p in tables)}
    return (
        [{**part, "params": [p for p in part["params"] if p not in small]} for part in parts],
        [{**part, "params": [p for p in part["params"] if p in small]} for part in parts],
    )


def adamw(
    parts: Parts,
    tables: set[nn.Parameter],
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    how: StateDtype,
    seed: int,
) -> list[torch.optim.Optimizer]:
    """torch's AdamW and ours where less than float32 is kept, each where it has parameters; each remembers its peak
    rate as `peak`. tables: embeddings."""
    optimizers: list[torch.optim.Optimizer] = []
    whole, small = split(parts, how, tables)
    if filled := _with_peak(whole, learning_rate):
        optimizers.append(FusedAdamW(filled, learning_rate, betas, epsilon))
    if filled := _with_peak(small, learning_rate):
        optimizers.append(LowPrecisionAdamW(filled, learning_rate, betas, epsilon, how, seed))
    return optimizers


def _with_peak(parts: Parts, learning_rate: float) -> Parts:
    """Those that are not empty, which torch would refuse."""
    return [{**part, "peak": learning_rate} for part in parts if part["params"]]
