"""Memory of a run on a CPU: the process without tensors, plus the tensors."""

from dataclasses import replace

from penjing.plan.memory.device_target import Target
from penjing.plan.memory.report import MemoryPlan, peak_events, plan_from
from penjing.plan.memory.trace import Trace

# Heap memory besides the tensors: fragmentation (a freed block does not fit the same aligned size again), and caches of
# the BLAS library. Four runs of the step alone (glibc, 1.6M and 26M parameters, float32 and bfloat16) used 44, 147, 153
# and 205 MiB besides tensors of 105, 550, 575 and 730 MiB.
HEAP_SHARE, HEAP_BYTES = 0.25, 20 << 20


def process_plan(
    trace: Trace,
    target: Target,
    *,
    process_bytes: int,
    saved_bytes: int = 0,
    event: int | None = None,
    notes: tuple[str, ...] = (),
) -> MemoryPlan:
    """The plan of a step traced for a CPU.

    process_bytes: the process without tensors. saved_bytes: the copy from which an asynchronous checkpoint is written
    while training continues. event: the event to report instead of the peak.
    """
    plan = plan_from(trace, replace(target, context_bytes=process_bytes), event=event, notes=notes)
    heap = int(HEAP_SHARE * plan.peak_allocated_bytes) + HEAP_BYTES
    total = plan.total_bytes + saved_bytes + heap
    waterfall = {**plan.waterfall, "heap": heap, **({"checkpoint copy": saved_bytes} if saved_bytes else {})}
    return replace(plan, total_bytes=total, waterfall=waterfall)


def extrapolate_peak(few: Trace, more: Trace, rows: tuple[int, int], target_rows: int) -> tuple[int, int]:
    """The events, in the traces of `rows`, where the peak for `target_rows` will be.

    Memory at each point of the step is linear in the rows; the highest line at `target_rows` counts. With few rows the
    peak may be in the optimizer, with many in the model.
    """
    low, high = rows
    first, second = peak_events(few), peak_events(more)
    few_bytes, more_bytes = few.live_bytes(), more.live_bytes()

    def predicted(key: tuple[str, str, str]) -> float:
        a, b = few_bytes[first[key]], more_bytes[second[key]]
        return a + (b - a) * (target_rows - low) / (high - low)

    highest = max(first.keys() & second.keys(), key=predicted)
    return first[highest], second[highest]


def extrapolate_plan(first: MemoryPlan, second: MemoryPlan, rows: tuple[int, int], target_rows: int) -> MemoryPlan:
    """The plan for `target_rows`, extrapolated from the plans of `rows` at the same point of the step."""
    low, high = rows

    def extrapolate(a: int, b: int) -> int:
        return max(0, a + (b - a) * (target_rows - low) // (high - low))

    names = dict.fromkeys([*first.waterfall, *second.waterfall])
    waterfall = {name: extrapolate(first.waterfall.get(name, 0), second.waterfall.get(name, 0)) for name in names}
    total = sum(waterfall.values())
    non_tensor = sum(waterfall.get(name, 0) for name in ("context", "heap", "checkpoint copy"))
    return replace(
        second,
        peak_allocated_bytes=total - non_tensor,
        peak_reserved_bytes=total - non_tensor,
        total_bytes=total,
        waterfall={name: size for name, size in waterfall.items() if size},
        notes=(*second.notes, f"traced at {low} and {high} rows, extrapolated from there"),
    )
