"""Trace the memory of a step for a plan, with a micro-batch size that fits."""

from dataclasses import dataclass

from penjing.plan.memory import MemoryPlan, Target
from penjing.planner.inputs import PlanOptions
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
    notes = [note for note in passes.plan(requested).notes if "every position" not in note]
    if rows < requested:
        notes.append(passes.reduced(rows))
    return Fitted(
        plan=passes.plan(rows),
        micro_size=rows,
        largest=passes.largest() if passes.limit and passes.geometry.micro_sizes[-1] < requested else 0,
        passes=passes,
        notes=notes,
    )
