"""Next-token prediction, for pretraining and for SFT: only the weights of the targets differ."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from penjing.feed.batch import Batch
from penjing.objective.base import Loss


class NextToken:
    """-sum_n w_n log p(target_n | what stands before it in its own document), in nats."""

    unit = "token"

    def weight(self, batch: Batch) -> Tensor:
        return batch.weight_N.sum()

    def __call__(self, model: Callable[..., Tensor], batch: Batch) -> Loss:
        total = model(
            batch.ids_BT,
            batch.document_BT,
            scored_N=batch.scored_N,
            target_N=batch.target_N,
            weight_N=batch.weight_N,
        )
        return Loss(total)
