"""Batches of full rows, in which every position has a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penjing.loader.batch import Batch
from penjing.loader.batch_source import Source


def full_rows(ids_BT: Tensor, document_BT: Tensor | None = None) -> Batch:
    """ids_BT: one token longer than a row. document_BT: None = each row is one document."""
    inputs_BT = ids_BT[:, :-1].contiguous()
    return Batch(
        ids_BT=inputs_BT,
        document_BT=torch.zeros_like(inputs_BT) if document_BT is None else document_BT,
        scored_N=None,
        target_N=ids_BT[:, 1:].flatten(),
        weight_N=torch.ones(inputs_BT.numel()),
        num_tokens=inputs_BT.numel(),
    )


class FullRows(Source):
    """A source of such batches, for the training loop."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __next__(self) -> Batch:
        return next(self._batches)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
