"""The load-balancing losses that a mixture of experts adds to any objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from penjing.base.config import NonNegativeFloat, Settings
from penjing.model.config import ModelConfig
from penjing.model.moe import RouterStats
from penjing.objective.base import Loss


@dataclass(frozen=True, kw_only=True)
class RouterSettings(Settings, section="router"):
    """Load balancing of a mixture of experts. Without effect on a dense model."""

    # batch: the classic balance loss, over all rows of a forward pass. sequence: over each row, which is stricter and
    # does not depend on the micro-batch size. auto: none if the router is balanced by bias (glm4_moe), else batch.
    balance: Literal["auto", "batch", "sequence", "none"] = "auto"
    aux_loss_coef: NonNegativeFloat = 0.01  # weight of the balance loss, per unit of the objective
    # weight of the router's squared logsumexp, which keeps its logits small; 0.001 is usual
    z_loss_coef: NonNegativeFloat = 0.0
    # glm4_moe: change of an expert's bias in a step, upwards if it had too few tokens
    bias_update_rate: NonNegativeFloat = 0.001

    def for_model(self, model: ModelConfig) -> RouterSettings:
        """These settings with `auto` resolved for this model."""
        if self.balance != "auto":
            return self
        return replace(self, balance="none" if model.architecture == "glm4_moe" else "batch")

    def loss(self, means: RouterStats, units_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The routers' loss, summed over these rows weighted by their units, and its parts by name."""
        units_B = units_B.to(means.z_B.dtype)
        over_pass = self.balance in ("auto", "batch")
        balance = means.batch * units_B.sum() if over_pass else (means.sequence_B * units_B).sum()
        z = (means.z_B * units_B).sum()
        total = self.z_loss_coef * z + (0.0 if self.balance == "none" else self.aux_loss_coef * balance)
        return total, {"router_balance": balance.detach(), "router_z": z.detach()}

    def add_to(self, loss: Loss, means: RouterStats | None, units_B: Callable[[], Tensor]) -> Loss:
        """An objective's loss plus the routers' loss. means: None for a dense model."""
        if means is None:
            return loss
        total, parts = self.loss(means, units_B())
        return Loss(loss.total + total, {**loss.parts, **parts})
