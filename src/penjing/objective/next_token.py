"""Next-token prediction, for pretraining and for SFT: only the weights of the targets differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from penjing.loader.batch import Batch
from penjing.objective.base import Loss, ObjectiveSettings
from penjing.objective.router import RouterSettings

FIGURE = "loss_nats_per_token"


@dataclass(frozen=True, kw_only=True)
class NextTokenSettings(ObjectiveSettings):
    """Learn to predict each next token: pretraining, and SFT where only answers count."""

    kind: Literal["next_token"] = "next_token"


class NextToken:
    """-sum_n w_n log p(target_n | what stands before it in its own document), in nats.

    A mixture of experts adds its router's losses; the reported loss is without them.
    """

    unit = "token"

    def __init__(self, router: RouterSettings = RouterSettings(), *, biased: bool = False) -> None:
        self.router, self.biased = router, biased

    def weight(self, batch: Batch) -> Tensor:
        return batch.weight_N.sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Loss:
        more = {} if batch.edge_S is None else {"edge_S": batch.edge_S}
        scored = model(
            batch.ids_BT,
            batch.document_BT,
            scored_N=batch.scored_N,
            target_N=batch.target_N,
            weight_N=batch.weight_N,
            **more,
        )
        if isinstance(scored, Tensor):
            return Loss(scored, {FIGURE: scored.detach()})
        nats, means = scored
        balance, parts = self.router.loss(means, batch.units_B(), biased=self.biased)
        return Loss(nats + balance, {FIGURE: nats.detach(), **parts})
