"""Moves a batch to a device, and adds the document boundaries that CUDA's attention kernels need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penjing import devices


def to_device(value: Any, device: torch.device) -> Any:
    """A batch's fields by name, or one field, on `device`; on CUDA `edge_S` is filled in if the batch has that field.

    Copies from pinned memory do not wait for the device.
    """
    if isinstance(value, dict):
        if devices.of(device).uses_cu_seqlens and "edge_S" in value:
            value = {**value, "edge_S": cu_seqlens(value["document_BT"])}
        return {name: to_device(inner, device) for name, inner in value.items()}
    if not isinstance(value, Tensor):
        return value
    return value.pin_memory().to(device, non_blocking=True) if devices.of(device).pins_memory else value.to(device)


# Positions per entry of `cu_seqlens`. If documents are longer than this on average, `cu_seqlens` has the same length in
# all batches of a run, so that nothing is recompiled.
POSITIONS_PER_EDGE = 64


def cu_seqlens(document_BT: Tensor) -> Tensor:
    """edge_S, int32, for variable-length attention: each document's first position in the concatenated rows.

    The total number of positions follows, repeated up to a length that few batches exceed.
    """
    total = document_BT.numel()
    new_BT = torch.ones_like(document_BT, dtype=torch.bool)
    new_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    first_N = new_BT.flatten().nonzero()[:, 0]
    size = max(64, total // POSITIONS_PER_EDGE)
    while size < len(first_N):
        size *= 2
    edge_S = torch.full((size + 1,), total, dtype=torch.int32)
    edge_S[: len(first_N)] = first_N
    return edge_S
