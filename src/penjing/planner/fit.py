"""The memory of a step for a plan, traced or by formula, with a micro-batch size that fits."""

from dataclasses import dataclass, replace

import torch

from penjing.plan.device_model import Machine
from penjing.plan.memory import MemoryPlan, Target, safe_bytes
from penjing.plan.rough_memory import rough_memory
from penjing.planner.inputs import PlanOptions, workload_of
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.memory_trace.fit import TracedPasses


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The traced memory of a step at a micro-batch size, and the largest size that fits."""

    plan: MemoryPlan
    micro_size: int
    largest: int  # approximate; 0 = unknown
    passes: TracedPasses  # traces passes of other sizes
    notes: list[str]


def fit(run: Run, target: Target, options: PlanOptions) -> Fitted:
    """Trace the step of the settings. If it does not fit and micro_size is not set, trace a smaller one that fits."""
    passes = TracedPasses(run, target, options.layout(run))
    requested, rows = passes.geometry.micro_size, passes.fitting_size()
    notes = [note for note in passes.plan(passes.full).notes if "every position" not in note]
    if rows < requested:
        notes.append(passes.reduced(rows))
    return Fitted(
        plan=passes.plan(rows),
        micro_size=rows,
        largest=passes.largest() if passes.limit and passes.geometry.micro_sizes[-1] < requested else 0,
        passes=passes,
        notes=notes,
    )


def rough_fit(run: Run, machine: Machine, target: Target, options: PlanOptions) -> tuple[int, dict[str, int]]:
    """The micro-batch size and the memory of its step, as `fit` chooses them, by formula."""
    geometry = batch_geometry(run, options.gpus, torch.device(machine.kind))
    sizes = [geometry.micro_size]
    if target.memory_bytes and not run.batch.micro_size:
        sizes += [size for size in geometry.micro_sizes if size < geometry.micro_size]
    work, parts = workload_of(run, machine, options, sizes[0]), dict[str, int]()
    state, context, on_host = run.state_bytes, target.context_bytes, machine.on_host
    scores = target.capability < (9, 0) if run.objective.varying_shapes and not on_host else None
    for size in sizes:
        passes = geometry.global_size // (size * options.gpus)
        work = replace(work, tokens=size * run.data.seq_len, passes=passes)  # full rows, as in a trace
        parts = rough_memory(work, state_bytes=state, context_bytes=context, on_host=on_host, holds_scores=scores)
        if not run.objective.generates_text:  # a reward is one number
            parts.pop("logits and loss", None)
        if sum(parts.values()) <= safe_bytes(target.memory_bytes):
            return size, parts
    return sizes[-1], parts
