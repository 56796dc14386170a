"""Summarise a trace: peak memory, where the peak is, and its components."""

from collections import defaultdict
from dataclasses import dataclass
from typing import get_args

from penjing.plan.memory.allocator import CachingAllocator, MemoryBlock, round_request
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.kernels import WORKSPACE
from penjing.plan.memory.trace import Component, Storage, Trace

ORDER = (*get_args(Component), "fragmentation", "context")  # of the waterfall


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Device memory of a step, in bytes.

    peak_allocated_bytes, peak_reserved_bytes: as `max_memory_allocated` and `max_memory_reserved` count;
    on a CPU both are the bytes of tensors. total_bytes: including memory outside PyTorch (context, communication; on a
    CPU the process itself). waterfall: the components of total_bytes at the peak, which add up to it.
    peak_at, peak_line: the operation whose result made the peak, and the source line it was called from.
    notes: which figures are estimates, and why.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_bytes: int
    waterfall: dict[str, int]
    peak_at: str
    peak_line: str
    peak_phase: str
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Replay:
    """Result of replaying a trace."""

    allocated: int
    reserved: int
    event_index: int  # event of the peak of allocated bytes


def replay(trace: Trace, target: Target) -> Replay:
    """Run a trace's events through the target's allocator. On a CPU nothing is rounded or cached."""
    if target.device.is_host:
        curve = trace.live_bytes()
        peak = max(curve, default=0)
        return Replay(peak, peak, curve.index(peak) if curve else 0)
    allocator = CachingAllocator()
    blocks: dict[int, MemoryBlock | None] = {}
    highest, event_index = -1, 0
    for index, event in enumerate(trace.events):
        if event > 0:
            blocks[event] = allocator.malloc(_bytes_of(trace.storages[event - 1], target))
        else:
            allocator.free(blocks.pop(-event))
        if allocator.allocated > highest:
            highest, event_index = allocator.allocated, index
    return Replay(allocator.peak_allocated, allocator.peak_reserved, event_index)


def plan_from(
    trace: Trace, target: Target, *, communication_bytes: int = 0, event: int | None = None, notes: tuple[str, ...] = ()
) -> MemoryPlan:
    """The plan of a traced step.

    communication_bytes: buffers of a communication library, outside PyTorch's count. event: CPU only; the event to
    report instead of the peak.
    """
    replayed = replay(trace, target)
    if event is not None:
        live = trace.live_bytes()[event]
        replayed = Replay(live, live, event)
    waterfall = dict.fromkeys(ORDER, 0)
    waterfall |= live_bytes_by_component(trace, target, replayed.event_index)
    waterfall["fragmentation"] = replayed.reserved - sum(waterfall.values())
    waterfall["communication"] += communication_bytes
    waterfall["context"] = target.context_bytes
    total = replayed.reserved + communication_bytes + target.context_bytes
    assert sum(waterfall.values()) == total
    peak = trace.storages[abs(trace.events[replayed.event_index]) - 1] if trace.events else None
    return MemoryPlan(
        peak_allocated_bytes=replayed.allocated,
        peak_reserved_bytes=replayed.reserved,
        total_bytes=total,
        waterfall={name: size for name, size in waterfall.items() if size},
        peak_at=peak.operation if peak else "",
        peak_line=peak.line if peak else "",
        peak_phase=peak.phase if peak else "",
        notes=notes,
    )


def peak_events(trace: Trace) -> dict[tuple[str, str, str], int]:
    """By phase, source line and operation: its allocation event at which the most bytes are live."""
    curve, highest = trace.live_bytes(), dict[tuple[str, str, str], int]()
    for event_index, event in enumerate(trace.events):
        if event > 0:
            storage = trace.storages[event - 1]
            key = (storage.phase, storage.line, storage.operation)
            if key not in highest or curve[event_index] > curve[highest[key]]:
                highest[key] = event_index
    return highest


def live_bytes_by_component(trace: Trace, target: Target, event_index: int) -> dict[str, int]:
    """Live bytes after event `event_index`, by component, rounded as the allocator does."""
    past = trace.events[: event_index + 1]
    sizes: defaultdict[str, int] = defaultdict(int)
    for event in {event for event in past if event > 0} - {-event for event in past if event < 0}:
        storage = trace.storages[event - 1]
        sizes[storage.component] += _bytes_of(storage, target)
    return sizes


def _bytes_of(storage: Storage, target: Target) -> int:
    """Size of a storage, rounded as the allocator does."""
    size = target.workspace_bytes if storage.num_bytes == WORKSPACE else storage.num_bytes
    return size if target.device.is_host or not size else round_request(size)
