"""Next-token prediction, for pretraining and SFT, which differ only in the targets' weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from penjing.loader.batch import Batch
from penjing.model.score import CrossEntropy
from penjing.objective.base import Loss, ObjectiveSettings
from penjing.objective.router import RouterSettings

LOSS_METRIC = "loss"


@dataclass(frozen=True, kw_only=True)
class NextTokenSettings(ObjectiveSettings):
    """Learn to predict the next token: pretraining, and SFT, where only answers have a loss."""

    name: Literal["next_token"] = "next_token"
    is_language_modelling: ClassVar = True
    takes_noise: ClassVar = True


class NextToken:
    """-sum_n w_n log p(target_n | earlier tokens of its document), in nats. A mixture of experts adds its router's
    losses; the reported loss does not include them."""

    def __init__(self, router: RouterSettings = RouterSettings()) -> None:
        self.router = router

    def weight(self, batch: Batch) -> Tensor:
        return batch.weight_N.sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Loss:
        scored = model(
            batch.ids_BT,
            batch.document_BT,
            score=CrossEntropy(batch.target_N, batch.weight_N),
            scored_N=batch.scored_N,
            **batch.further_inputs,
        )
        nats, means = (scored, None) if isinstance(scored, Tensor) else scored
        return self.router.add_to(Loss(nats, {LOSS_METRIC: nats.detach()}), means, batch.units_B)
