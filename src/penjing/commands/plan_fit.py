"""Whether a step fits: traced memory, at the largest micro-batch that there is memory for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from penjing.base import formatting as units
from penjing.commands.plan_run import PlanOptions
from penjing.plan.memory import MemoryPlan, Target, safe_bytes
from penjing.plan.step_workload import Workload
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run

MOST_LOGITS = 1 << 36  # of the largest pass that is looked for: 512 of the head's blocks, a second of tracing
WHOLE_BYTES = {"zero1": 8.0, "zero2": 4.0, "fsdp": 0.0}  # of the 16 of a parameter, not sharded; other strategies: all


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The traced memory of a step at a micro-batch size, and the largest size that fits."""

    plan: MemoryPlan
    micro_size: int
    largest: int  # about; 0 = not known
    bytes_per_row: float  # bytes of each row, up to the rows that were wanted
    notes: list[str]
    fits: Callable[[int], bool]  # whether a pass of so many rows does, traced


def fit(run: Run, target: Target, options: PlanOptions, wanted: int) -> Fitted:
    """Trace the step as the settings say. If it does not fit and micro_size is not set, trace one that fits."""
    from penjing.train.memory_trace.trace import predict_memory  # slow to import, and not every page traces

    known: dict[int, MemoryPlan] = {}

    def at(rows: int) -> MemoryPlan:
        if rows not in known:
            known[rows] = predict_memory(run, target, micro_size=rows, ranks=options.gpus, engine=options.strategy)
        return known[rows]

    plan, share, rows = at(wanted), run.batch.size // options.gpus, wanted
    less = next((each for each in divisors(share) if each < wanted), 0)
    bytes_per_row = (plan.total_bytes - at(less).total_bytes) / (wanted - less) if less else 0.0
    notes = [note for note in plan.notes if "every position" not in note]
    limit = safe_bytes(target.memory_bytes)
    if limit and plan.total_bytes > limit and not run.batch.micro_size:
        line = wanted - (plan.total_bytes - limit) / max(1.0, bytes_per_row)
        rows = next((each for each in divisors(wanted) if each <= line), 1)
        while at(rows).total_bytes > limit and rows > 1:
            rows = next(each for each in divisors(wanted) if each < rows)
        if at(rows).total_bytes > target.memory_bytes:
            rows = wanted
        elif rows < wanted:
            exact = batch_geometry(run, options.gpus, torch.device(target.kind)).exact
            same = "the same gradients" if exact else "the routers' balance loss is taken over each"
            notes.append(
                f"a micro-batch of {wanted} takes {units.gibibytes(plan.total_bytes)}; "
                f"planned with batch.micro_size={rows} and accumulation {share // rows}: {same}"
            )
    most = MOST_LOGITS // (run.data.seq_len * run.model.vocab_size)
    return Fitted(
        plan=at(rows),
        micro_size=rows,
        largest=_largest(known, at, bytes_per_row, limit, most) if limit and less else 0,
        bytes_per_row=bytes_per_row,
        notes=notes,
        fits=lambda each: at(each).total_bytes <= limit,
    )


def _largest(
    known: Mapping[int, MemoryPlan], at: Callable[[int], MemoryPlan], bytes_per_row: float, limit: int, most: int
) -> int:
    """About how many rows fit in one pass, at most `most`; 0 if none of those that were traced do.

    Memory is the highest of several lines in the rows: the optimizer's peak stays, that of activations grows. Between
    two traced numbers it is at most on the line through them; beyond them it may be far above. So where that line
    exceeds the limit is traced too.
    """
    good = max((rows for rows, plan in known.items() if plan.total_bytes <= limit), default=0)
    if not good:
        return 0
    if good == max(known):
        further = (limit - known[good].total_bytes) / max(1.0, bytes_per_row)
        beyond = min(good + math.floor(further), max(good, most))
        if at(beyond).total_bytes <= limit:
            return beyond
    bad = min(rows for rows in known if rows > good)
    share = (limit - known[good].total_bytes) / (known[bad].total_bytes - known[good].total_bytes)
    return good + math.floor((bad - good) * share)


def divisors(number: int) -> list[int]:
    """Largest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]


def external_memory(work: Workload) -> float:
    """A formula: states of 16 bytes a parameter, of which devices that share them hold a part each, activations by
    width, whole logits, and a context."""
    shape, whole = work.shape, WHOLE_BYTES.get(work.sharding, 16.0)
    states = (whole + (16.0 - whole) / work.ranks) * shape.parameters
    layers = shape.layers * work.tokens * (34 * shape.width + 4 * shape.intermediate_size)
    return states + layers + 12.0 * work.tokens * shape.vocabulary + 0.5 * 2**30
