"""Memory of a run on a CPU: what the process is without tensors, and the tensors in it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

from penjing.base.errors import UserError
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.report import MemoryPlan, highest_places, plan_from
from penjing.plan.memory.trace import Trace

# What the C library's heap holds beside the tensors: a freed place does not take the same aligned size again, and
# caches of the matrix library. Four runs of the step alone (glibc, 1.6M and 26M parameters, float32 and bfloat16)
# held 44, 147, 153 and 205 MiB beside tensors of 105, 550, 575 and 730 MiB.
HEAP_SHARE, HEAP_BYTES = 0.25, 20 << 20

# Loads what a training run loads, multiplies each way and takes an optimizer's step: libraries make their caches and
# load the rest of themselves when they are first used.
_PROCESS = """
import torch
from penjing.base.process_info import peak_resident_bytes
from penjing.optim.adamw_no_dynamo import FusedAdamW
from penjing.commands import train
x = torch.nn.Parameter(torch.ones(128, 128))
for dtype in (torch.float32, torch.bfloat16):
    (x.to(dtype) @ x.to(dtype).T).float().sum().backward()
optimizer = FusedAdamW([{"params": [x]}], 1e-3, (0.9, 0.95), 1e-8)
optimizer.step()
optimizer.zero_grad()
del x, optimizer
print(peak_resident_bytes())
"""


@cache
def measured_process_bytes() -> int:
    """What a training process holds before it has a model: measured in a process of its own, some seconds, once."""
    done = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True)
    if done.returncode:
        raise UserError("a process could not be measured", got=done.stderr.strip().splitlines()[-1:])
    return int(done.stdout.split()[-1])


def process_plan(
    trace: Trace,
    target: Target,
    *,
    process_bytes: int,
    saved_bytes: int = 0,
    place: int | None = None,
    notes: tuple[str, ...] = (),
) -> MemoryPlan:
    """The plan of a step traced for a CPU.

    process_bytes: the process without tensors. saved_bytes: the copy that a checkpoint in the background is written
    from, which stands beside the steps that go on. place: the event to look at in the peak's stead.
    """
    plan = plan_from(trace, replace(target, memory_bytes=0, context_bytes=process_bytes), place=place, notes=notes)
    heap = int(HEAP_SHARE * plan.peak_allocated_bytes) + HEAP_BYTES
    total = plan.total_bytes + saved_bytes + heap
    waterfall = {**plan.waterfall, "heap": heap, **({"checkpoint copy": saved_bytes} if saved_bytes else {})}
    fits = total <= target.memory_bytes if target.memory_bytes else None
    return replace(plan, total_bytes=total, waterfall=waterfall, fits=fits)


def peak_at_more_rows(few: Trace, more: Trace, rows: tuple[int, int], wanted: int) -> tuple[int, int]:
    """Where the peak of `wanted` rows will be: that event of the traces of `rows`.

    Tensors grow with the rows or stay, so each place in the step has a line of its own; the highest at `wanted` counts.
    Of few rows the optimizer may need the most, and of many the model.
    """
    low, high = rows
    first, second = highest_places(few), highest_places(more)
    few_bytes, more_bytes = few.live_bytes(), more.live_bytes()

    def predicted(key: tuple[str, str, str]) -> float:
        a, b = few_bytes[first[key]], more_bytes[second[key]]
        return a + (b - a) * (wanted - low) / (high - low)

    highest = max(first.keys() & second.keys(), key=predicted)
    return first[highest], second[highest]


def at_more_rows(first: MemoryPlan, second: MemoryPlan, rows: tuple[int, int], wanted: int) -> MemoryPlan:
    """The plan of `wanted` rows on the line through those of `rows`, which look at one place in the step."""
    low, high = rows

    def line(a: int, b: int) -> int:
        return max(0, a + (b - a) * (wanted - low) // (high - low))

    names = dict.fromkeys([*first.waterfall, *second.waterfall])
    waterfall = {name: line(first.waterfall.get(name, 0), second.waterfall.get(name, 0)) for name in names}
    total = sum(waterfall.values())
    outside = sum(waterfall.get(name, 0) for name in ("context", "heap", "checkpoint copy"))
    return replace(
        second,
        peak_allocated_bytes=total - outside,
        peak_reserved_bytes=total - outside,
        total_bytes=total,
        waterfall={name: size for name, size in waterfall.items() if size},
        notes=(*second.notes, f"traced at {low} and {high} rows, the rest on a line"),
    )
