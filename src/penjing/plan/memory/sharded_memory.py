"""Memory per rank when several devices share a step.

DDP is traced: its buckets exist from the start, and gradients become views of them. Sharding (FSDP2, ZeRO) is an
estimate: computed from the trace of one device, by component.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from penjing.plan.memory.trace import Storage, Trace

Layout = Literal["single", "ddp", "fsdp", "zero1", "zero2", "zero3"]
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes; torch's defaults
# NCCL's buffers on two GPUs grew from 0.55 to 2.00 GiB at the first barrier (S. Bekman); the increase is used.
COMMUNICATION_BYTES = int(1.45 * (1 << 30))
COMMUNICATION_NOTE = "communication buffers are an estimate: 1.45 GiB, as NCCL took on two GPUs"

# What each layout divides by the number of ranks.
_SHARDED = {
    "zero1": ("optimizer state",),
    "zero2": ("optimizer state", "gradients"),
    "zero3": ("optimizer state", "gradients", "weights", "master weights"),
    "fsdp": ("optimizer state", "gradients", "weights", "master weights"),
}


class GradientBuckets:
    """DDP's gradient buckets: full copies of all gradients in the order of the backward pass, last layers first.

    Gradients become views of the buckets when they are reduced (`gradient_as_bucket_view`).
    """

    def __init__(self, model: nn.Module) -> None:
        self.requires_sync = True
        self.tensors: list[Tensor] = []
        capacity, sizes, parts = FIRST_BUCKET, list[int](), list[list[nn.Parameter]]()
        for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
            if not parts or sizes[-1] >= capacity or parts[-1][0].dtype != parameter.dtype:
                capacity = FIRST_BUCKET if not parts else BUCKET
                parts.append([])
                sizes.append(0)
            parts[-1].append(parameter)
            sizes[-1] += parameter.numel() * parameter.element_size()
        for part in parts:
            bucket = torch.empty(sum(p.numel() for p in part), dtype=part[0].dtype, device="meta")
            self.tensors.append(bucket)
            offset = 0
            for parameter in part:
                self._watch(parameter, bucket[offset : offset + parameter.numel()].view(parameter.shape))
                offset += parameter.numel()

    def _watch(self, parameter: nn.Parameter, view: Tensor) -> None:
        def reduce(ready: Tensor) -> None:
            if self.requires_sync:
                ready.grad = view

        parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's trace, its memory outside PyTorch's count, and notes on estimates."""

    trace: Trace
    communication_bytes: int
    notes: tuple[str, ...]


def rank_memory(trace: Trace, layout: Layout, ranks: int, gathered: tuple[int, int]) -> RankMemory:
    """The trace of one rank of `ranks`.

    gathered: parameters of a block, and of the largest unit that is gathered at once. FSDP2 and ZeRO-3 hold two
    gathered units in half precision (the current and the next) and one unit's full gradients in float32.
    """
    if ranks < 2:
        return RankMemory(trace, 0, ())
    if layout == "ddp" or layout == "single":
        return RankMemory(trace, COMMUNICATION_BYTES, (COMMUNICATION_NOTE,))
    parts = _SHARDED[layout]
    shards_weights = "weights" not in parts

    def of_rank(storage: Storage) -> Storage:
        if storage.component not in parts:
            return storage
        # Copies of master weights in the matmul dtype are the gathered weights, which are counted below.
        copied = storage.component == "weights" and storage.operation == "_to_copy"
        return replace(storage, num_bytes=0 if copied else -(-storage.num_bytes // ranks))

    storages = [of_rank(storage) for storage in trace.storages]
    events = list(trace.events)
    if not shards_weights:
        block, largest = gathered
        for size in (largest * 2, block * 2, largest * 4):
            storages.append(Storage(size, "all_gather", "", "build", "communication"))
            events.insert(0, len(storages))
    notes = (COMMUNICATION_NOTE, f"{layout} over {ranks} ranks is computed from one device's trace, not traced")
    return RankMemory(Trace(storages, events), COMMUNICATION_BYTES, notes)
