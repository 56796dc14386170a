"""AdamW (arXiv:1711.05101), torch's own fused kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penjing.base.errors import UserError
from penjing.optim.groups import group


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= rate (m^ / (sqrt(v^) + eps) + decay w)."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = 5e-4  # peak
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of block matrices only; gains, embedding and head do not decay

    def __post_init__(self) -> None:
        check_settings(self)

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = group(model)
        parts: list[dict[str, Any]] = [
            {"params": groups.matrices, "weight_decay": self.weight_decay},
            {"params": groups.tables + groups.gains, "weight_decay": 0.0},
        ]
        return [adamw(parts, self.learning_rate, (self.beta1, self.beta2), self.epsilon)]


def check_settings(settings: Any) -> None:
    """Refuse a rate, decay or average that torch would refuse later, or that would not learn. Raises UserError."""
    for name, value in vars(settings).items():
        where = f"optimizer.{name}"
        if name.endswith(("learning_rate", "epsilon")) and not 0 < value < math.inf:
            raise UserError("out of range", where=where, got=value, wanted="more than 0")
        if name == "weight_decay" and not 0 <= value < math.inf:
            raise UserError("out of range", where=where, got=value, wanted="0 or more")
        if name in ("beta1", "beta2", "momentum") and not 0 <= value < 1:
            raise UserError("out of range", where=where, got=value, wanted="0 or more, less than 1")


def adamw(
    parts: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.Optimizer:
    """torch's AdamW over the parts that are not empty; each remembers its peak rate as `peak`."""
    filled = [{**part, "peak": part.get("lr", learning_rate)} for part in parts if part["params"]]
    return torch.optim.AdamW(filled, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
