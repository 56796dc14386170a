"""From a trace to the figures a person asks for: peaks, where they are, and what they are made of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import get_args

from penjing.plan.memory.allocator import CachingAllocator, MemoryBlock, OutOfMemory, round_request
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.kernels import WORKSPACE
from penjing.plan.memory.trace import Component, Storage, Trace

ORDER = (*get_args(Component), "fragmentation", "context")  # of the waterfall


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a step needs of a device, in bytes.

    peak_allocated_bytes, peak_reserved_bytes: as `torch.cuda.max_memory_allocated` and `max_memory_reserved` count;
    of a CPU both are the bytes of tensors. total_bytes: with what stands outside PyTorch (context, communication; of a
    CPU the process itself). waterfall: parts of total_bytes at the moment of the peak, which add up to it.
    peak_at, peak_line: the operation whose result made the peak, and the source line it was called from.
    notes: what is an estimate, and why.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_bytes: int
    waterfall: dict[str, int]
    peak_at: str
    peak_line: str
    peak_phase: str
    fits: bool | None  # None where the device's memory is not known
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Replay:
    """A trace, gone through the allocator. fits: False if the device was full on the way."""

    allocated: int
    reserved: int
    place: int  # event of the peak of allocated bytes
    fits: bool


def replay(trace: Trace, target: Target, *, capacity: int = 0) -> Replay:
    """Run a trace's events through the target's allocator.

    capacity: bytes for segments, 0 = no limit. On a CPU nothing is rounded and nothing is kept.
    """
    if target.kind == "cpu":
        curve = trace.live_bytes()
        peak = max(curve, default=0)
        return Replay(peak, peak, curve.index(peak) if curve else 0, not capacity or peak <= capacity)
    allocator = CachingAllocator(capacity)
    blocks: dict[int, MemoryBlock | None] = {}
    highest, place, fits = -1, 0, True
    try:
        for index, event in enumerate(trace.events):
            if event > 0:
                blocks[event] = allocator.malloc(_bytes_of(trace.storages[event - 1], target))
            else:
                allocator.free(blocks.pop(-event))
            if allocator.allocated > highest:
                highest, place = allocator.allocated, index
    except OutOfMemory:
        fits = False
    return Replay(allocator.peak_allocated, allocator.peak_reserved, place, fits)


def plan_from(
    trace: Trace,
    target: Target,
    *,
    communication_bytes: int = 0,
    place: int | None = None,
    notes: tuple[str, ...] = (),
) -> MemoryPlan:
    """The plan of a traced step.

    communication_bytes: buffers of a communication library, outside PyTorch's count. place: of a CPU, the event to look
    at in the peak's stead.
    """
    found = replay(trace, target)
    if place is not None:
        alive = trace.live_bytes()[place]
        found = Replay(alive, alive, place, fits=True)
    waterfall = dict.fromkeys(ORDER, 0)
    waterfall |= alive_at(trace, target, found.place)
    waterfall["fragmentation"] = found.reserved - sum(waterfall.values())
    waterfall["communication"] += communication_bytes
    waterfall["context"] = target.context_bytes
    total = found.reserved + communication_bytes + target.context_bytes
    assert sum(waterfall.values()) == total
    fits = None
    if target.memory_bytes:
        available = target.memory_bytes - target.context_bytes - communication_bytes
        fits = replay(trace, target, capacity=available).fits if available > 0 else False
    peak = trace.storages[abs(trace.events[found.place]) - 1] if trace.events else None
    return MemoryPlan(
        peak_allocated_bytes=found.allocated,
        peak_reserved_bytes=found.reserved,
        total_bytes=total,
        waterfall={name: size for name, size in waterfall.items() if size},
        peak_at=peak.operation if peak else "",
        peak_line=peak.line if peak else "",
        peak_phase=peak.phase if peak else "",
        fits=fits,
        notes=notes,
    )


def highest_places(trace: Trace) -> dict[tuple[str, str, str], int]:
    """By phase, source line and operation: the event at which the most bytes are alive, of those it makes."""
    curve, highest = trace.live_bytes(), dict[tuple[str, str, str], int]()
    for place, event in enumerate(trace.events):
        if event > 0:
            made = trace.storages[event - 1]
            key = (made.phase, made.line, made.operation)
            if key not in highest or curve[place] > curve[highest[key]]:
                highest[key] = place
    return highest


def alive_at(trace: Trace, target: Target, place: int) -> dict[str, int]:
    """Bytes by component of what is alive after event `place`, rounded as the allocator does."""
    past = trace.events[: place + 1]
    sizes: defaultdict[str, int] = defaultdict(int)
    for event in {event for event in past if event > 0} - {-event for event in past if event < 0}:
        made = trace.storages[event - 1]
        sizes[made.component] += _bytes_of(made, target)
    return sizes


def _bytes_of(storage: Storage, target: Target) -> int:
    """What a storage takes up, rounded as the allocator does."""
    size = target.workspace_bytes if storage.num_bytes == WORKSPACE else storage.num_bytes
    return round_request(size) if target.kind == "cuda" and size else size
