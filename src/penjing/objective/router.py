"""What a mixture of experts adds to any objective so that its experts are used evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from penjing.base.config import NonNegativeFloat, Settings
from penjing.model.moe import RouterMeans


@dataclass(frozen=True, kw_only=True)
class RouterSettings(Settings):
    """How the experts of a mixture are kept evenly used. Without effect on a dense model."""

    section: ClassVar = "router"

    # batch: the classic balance loss, over all rows of a forward pass. sequence: over each row alone, stricter, and
    # the same however a step is cut up. auto: none where the router is balanced by bias (glm4_moe), else batch.
    balance: Literal["auto", "batch", "sequence", "none"] = "auto"
    balance_weight: NonNegativeFloat = 0.01  # of that loss, beside one unit of the objective
    z_weight: NonNegativeFloat = 0.0  # of the router's logsumexp squared, which keeps its logits small; 0.001 is usual
    bias_rate: NonNegativeFloat = 0.001  # glm4_moe: how far a step moves an expert's bias, up if it had too few tokens

    def balance_kind(self, *, biased: bool) -> Literal["batch", "sequence", "none"]:
        """What `auto` comes to. biased: the router is balanced by bias."""
        if self.balance != "auto":
            return self.balance
        return "none" if biased else "batch"

    def loss(self, means: RouterMeans, units_B: Tensor, *, biased: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum to be added over these rows, and its parts by name; a row weighs as many units as it has.

        biased: the router is balanced by bias.
        """
        kind = self.balance_kind(biased=biased)
        units_B = units_B.to(means.z_B.dtype)
        balance = means.batch * units_B.sum() if kind == "batch" else (means.sequence_B * units_B).sum()
        z = (means.z_B * units_B).sum()
        total = self.z_weight * z + (0.0 if kind == "none" else self.balance_weight * balance)
        return total, {"router_balance": balance.detach(), "router_z": z.detach()}
