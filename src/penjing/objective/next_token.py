"""Next-token prediction, for pretraining and SFT, which differ only in the targets' weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from penjing.base.config import NonNegativeFloat
from penjing.loader.batch import Batch
from penjing.model.score import CrossEntropy, CrossEntropyOfTwo
from penjing.objective.base import Loss, ObjectiveSettings
from penjing.objective.router import RouterSettings

LOSS_METRIC = "loss"


@dataclass(frozen=True, kw_only=True)
class NextTokenSettings(ObjectiveSettings):
    """Learn to predict the next token: pretraining, and SFT, where only answers have a loss."""

    name: Literal["next_token"] = "next_token"
    # multi-token prediction: weight at the start of a second loss, of the token after the next one, which the same
    # logits predict; it falls linearly to 0 over the first two thirds of the run. 0.5 is usual
    mtp_weight: NonNegativeFloat = 0.0
    is_language_modelling: ClassVar = True
    takes_noise: ClassVar = True


MTP_SHARE = 2 / 3  # of the steps have the second loss


class NextToken:
    """-sum_n w_n log p(target_n | earlier tokens of its document), in nats. A mixture of experts adds its router's
    losses, multi-token prediction (arXiv:2404.19737, here without a head of its own) the second loss; the reported loss
    does not include them."""

    def __init__(self, router: RouterSettings = RouterSettings()) -> None:
        self.router = router

    def weight(self, batch: Batch) -> Tensor:
        return batch.weight_N.sum()

    def __call__(self, model: Callable[..., Any], batch: Batch) -> Loss:
        score: CrossEntropy | CrossEntropyOfTwo = CrossEntropy(batch.target_N, batch.weight_N)
        if batch.mtp_weight is not None:
            score = CrossEntropyOfTwo(batch.target_N, second_targets(batch), batch.weight_N)
        scored = model(batch.ids_BT, batch.document_BT, score=score, scored_N=batch.scored_N, **batch.further_inputs)
        nats, means = (scored, None) if isinstance(scored, Tensor) else scored
        total = nats
        if batch.mtp_weight is not None:
            nats, second = nats
            total = nats + batch.mtp_weight * second
        return self.router.add_to(Loss(total, {LOSS_METRIC: nats.detach()}), means, batch.units_B)


def second_targets(batch: Batch) -> Tensor:
    """second_N: the token after each target. Where a row, a document or an answer ends there, the target again."""
    target_N = batch.target_N
    index_N = torch.arange(len(target_N), device=target_N.device) if batch.scored_N is None else batch.scored_N
    document_N = batch.document_BT.flatten()[index_N]
    follows = (index_N[1:] == index_N[:-1] + 1) & (index_N[1:] % batch.ids_BT.shape[1] != 0)
    follows &= document_N[1:] == document_N[:-1]
    return torch.cat([torch.where(follows, target_N[1:], target_N[:-1]), target_N[-1:]])
