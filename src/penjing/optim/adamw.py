"""AdamW (arXiv:1711.05101), torch's own fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

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

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        groups = group(model)
        parts: list[dict[str, Any]] = [
            {"params": groups.matrices, "weight_decay": self.weight_decay},
            {"params": groups.tables + groups.gains, "weight_decay": 0.0},
        ]
        return [adamw(parts, self.learning_rate, (self.beta1, self.beta2), self.epsilon)]


def adamw(
    parts: list[dict[str, Any]], learning_rate: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.Optimizer:
    """torch's AdamW over the parts that are not empty; each remembers its peak rate as `peak`."""
    filled = [{**part, "peak": part.get("lr", learning_rate)} for part in parts if part["params"]]
    return torch.optim.AdamW(filled, lr=learning_rate, betas=betas, eps=epsilon, fused=True)
