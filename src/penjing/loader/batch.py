"""A batch of packed rows, and its way to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penjing import devices
from penjing.data.packing.concat import Row


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows as tensors.

    ids_BT, document_BT: input ids, and each one's document. scored_N: flat indices of the positions that reach the
    output head (None: all positions); target_N, weight_N: their target ids and loss weights.
    num_tokens: positions without padding, for throughput metrics.
    cu_seqlens_S: first position of each document in the concatenated rows; set on the way to a GPU (see `to_device`).
    noise_B: a seed for each row's noise in training (model/regularization.py); None: no noise.
    mtp_weight: a number, the weight of the second loss (objective/next_token.py); None: there is none.
    """

    ids_BT: Tensor
    document_BT: Tensor
    scored_N: Tensor | None
    target_N: Tensor
    weight_N: Tensor
    num_tokens: int
    cu_seqlens_S: Tensor | None = None
    noise_B: Tensor | None = None
    mtp_weight: Tensor | None = None

    @property
    def further_inputs(self) -> dict[str, Tensor]:
        """What the model takes beside ids and documents."""
        found = {"cu_seqlens_S": self.cu_seqlens_S, "noise_B": self.noise_B}
        return {name: value for name, value in found.items() if value is not None}

    def units_B(self) -> Tensor:
        """The weight of each row: the sum of its positions' weights."""
        rows, num_tokens = self.ids_BT.shape
        if self.scored_N is None:
            return self.weight_N.view(rows, num_tokens).sum(dim=1)
        return self.weight_N.new_zeros(rows).index_add_(0, self.scored_N // num_tokens, self.weight_N)

    def to(self, device: torch.device) -> Batch:
        return replace(self, **to_device(vars(self), device))


def collate(rows: Sequence[Row]) -> Batch:
    """Stack rows. `scored_N` excludes positions of weight 0, so that the head does not compute them."""
    weight_BT = np.stack([row.weight_T for row in rows])
    target_BT = np.stack([row.target_T for row in rows])
    document_BT = np.stack([row.document_T for row in rows])
    scored_N = None if weight_BT.all() else np.flatnonzero(weight_BT)
    selected = slice(None) if scored_N is None else scored_N
    return Batch(
        ids_BT=torch.from_numpy(np.stack([row.ids_T for row in rows])),
        document_BT=torch.from_numpy(document_BT),
        scored_N=None if scored_N is None else torch.from_numpy(scored_N),
        target_N=torch.from_numpy(target_BT.reshape(-1)[selected]),
        weight_N=torch.from_numpy(weight_BT.reshape(-1)[selected]),
        num_tokens=int((document_BT >= 0).sum()),
    )


def to_device(value: Any, device: torch.device) -> Any:
    """A batch's fields by name, or one field, on `device`; on a GPU `cu_seqlens_S` is filled in if it is there. Copies
    from pinned memory do not wait for the device."""
    if isinstance(value, dict):
        if devices.of(device).uses_cu_seqlens and "cu_seqlens_S" in value:
            value = {**value, "cu_seqlens_S": cu_seqlens(value["document_BT"])}
        return {name: to_device(inner, device) for name, inner in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.pin_memory().to(device, non_blocking=True) if devices.of(device).pins_memory else value.to(device)


# Positions per entry of `cu_seqlens`. If documents are longer than this on average, `cu_seqlens` has the same length in
# all batches of a run, so that nothing is recompiled.
POSITIONS_PER_EDGE = 64


def cu_seqlens(document_BT: Tensor) -> Tensor:
    """cu_seqlens_S, int32, for variable-length attention: each document's first position in the concatenated rows. The
    total number of positions follows, repeated up to a length that few batches exceed."""
    total = document_BT.numel()
    new_BT = torch.ones_like(document_BT, dtype=torch.bool)
    new_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    first_N = new_BT.flatten().nonzero()[:, 0]
    size = max(64, total // POSITIONS_PER_EDGE)
    while size < len(first_N):
        size *= 2
    cu_seqlens_S = torch.full((size + 1,), total, dtype=torch.int32)
    cu_seqlens_S[: len(first_N)] = first_N
    return cu_seqlens_S
