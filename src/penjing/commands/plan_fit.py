"""Trace the memory of a step, and find a micro-batch size that fits."""

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

MAX_LOGITS = 1 << 36  # of the largest pass that is searched: 512 blocks of the head, a second of tracing
UNSHARDED_BYTES = {"zero1": 8.0, "zero2": 4.0, "fsdp": 0.0}  # of the 16 per parameter; other strategies: all 16


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The traced memory of a step at a micro-batch size, and the largest size that fits."""

    plan: MemoryPlan
    micro_size: int
    largest: int  # approximate; 0 = unknown
    bytes_per_row: float  # slope up to the requested rows
    notes: list[str]
    fits: Callable[[int], bool]  # traces a pass of so many rows


def fit(run: Run, target: Target, options: PlanOptions, requested: int) -> Fitted:
    """Trace the step of the settings. If it does not fit and micro_size is not set, trace a smaller one that fits."""
    from penjing.train.memory_trace.trace import predict_memory  # slow to import, and not every report traces

    traced: dict[int, MemoryPlan] = {}

    def trace(rows: int) -> MemoryPlan:
        if rows not in traced:
            traced[rows] = predict_memory(run, target, micro_size=rows, ranks=options.gpus, engine=options.strategy)
        return traced[rows]

    plan, share, rows = trace(requested), run.batch.size // options.gpus, requested
    fewer = next((each for each in divisors(share) if each < requested), 0)
    bytes_per_row = (plan.total_bytes - trace(fewer).total_bytes) / (requested - fewer) if fewer else 0.0
    notes = [note for note in plan.notes if "every position" not in note]
    limit = safe_bytes(target.memory_bytes)
    if limit and plan.total_bytes > limit and not run.batch.micro_size:
        line = requested - (plan.total_bytes - limit) / max(1.0, bytes_per_row)
        rows = next((each for each in divisors(requested) if each <= line), 1)
        while trace(rows).total_bytes > limit and rows > 1:
            rows = next(each for each in divisors(requested) if each < rows)
        if trace(rows).total_bytes > target.memory_bytes:
            rows = requested
        elif rows < requested:
            exact = batch_geometry(run, options.gpus, torch.device(target.kind)).exact
            effect = "the same gradients" if exact else "the router's auxiliary loss is computed per micro-batch"
            notes.append(
                f"a micro-batch of {requested} takes {units.gibibytes(plan.total_bytes)}; "
                f"planned with batch.micro_size={rows} and accumulation {share // rows}: {effect}"
            )
    max_rows = MAX_LOGITS // (run.data.seq_len * run.model.vocab_size)
    return Fitted(
        plan=trace(rows),
        micro_size=rows,
        largest=_largest(traced, trace, bytes_per_row, limit, max_rows) if limit and fewer else 0,
        bytes_per_row=bytes_per_row,
        notes=notes,
        fits=lambda each: trace(each).total_bytes <= limit,
    )


def _largest(
    traced: Mapping[int, MemoryPlan], predict: Callable[[int], MemoryPlan], bytes_per_row: float, limit: int, cap: int
) -> int:
    """About how many rows fit in one pass, at most `cap`; 0 if no traced number fits.

    Memory is the maximum of several linear functions of the rows: the optimizer's peak is constant, that of activations
    grows. So it is convex: between two traced points it is at most the chord, beyond them it may be far above it. The
    point where the extrapolated line meets the limit is therefore traced too.
    """
    fitting = max((rows for rows, plan in traced.items() if plan.total_bytes <= limit), default=0)
    if not fitting:
        return 0
    if fitting == max(traced):
        further = (limit - traced[fitting].total_bytes) / max(1.0, bytes_per_row)
        beyond = min(fitting + math.floor(further), max(fitting, cap))
        if predict(beyond).total_bytes <= limit:
            return beyond
    over = min(rows for rows in traced if rows > fitting)
    share = (limit - traced[fitting].total_bytes) / (traced[over].total_bytes - traced[fitting].total_bytes)
    return fitting + math.floor((over - fitting) * share)


def divisors(number: int) -> list[int]:
    """Divisors, largest first."""
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def external_memory(work: Workload) -> float:
    """A formula: 16 bytes per parameter of weights, gradients and optimizer state (less the sharded part), activations
    by width, full logits, and a context."""
    shape, unsharded = work.shape, UNSHARDED_BYTES.get(work.sharding, 16.0)
    states = (unsharded + (16.0 - unsharded) / work.ranks) * shape.parameters
    layers = shape.layers * work.tokens * (34 * shape.width + 4 * shape.intermediate_size)
    return states + layers + 12.0 * work.tokens * shape.vocabulary + 0.5 * 2**30
