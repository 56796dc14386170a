"""Compare the strategies of a run on several devices: memory of a rank, time of a step, and which one to take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.parallel import STRATEGIES
from penjing.parallel.single import Single
from penjing.plan.device_model import Machine
from penjing.plan.flops import parameters
from penjing.plan.memory import Target
from penjing.plan.memory.report import MemoryPlan
from penjing.planner.inputs import PlanOptions, busy_seconds, workload_of
from penjing.train.config import Run
from penjing.train.memory_trace.fit import TracedPasses
from penjing.train.resolve import with_settings

STATES = ("weights", "master weights", "gradients", "optimizer state")  # grow with the model, not with the batch


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """A strategy on the devices of the plan."""

    strategy: str
    micro_size: int
    rank_bytes: int
    waterfall: dict[str, int]
    fits: bool | None  # None: the device's memory is unknown
    step_seconds: float
    speedup: float  # against one device
    most_parameters: int  # of a model of this shape that fits, roughly; 0 = unknown


def compare_strategies(
    run: Run, machine: Machine, target: Target, options: PlanOptions, steps: int
) -> list[StrategyPlan]:
    """Each strategy of the table that can share this run; none on one device, or if the settings name one.

    steps: of the full run, which determine whether compiling pays.
    """
    rows = []
    for name in STRATEGIES if options.gpus > 1 and run.parallel.strategy == "auto" else ():
        kind = look_up(STRATEGIES, name, what="parallel.strategy")
        try:
            variant = with_settings(run, {"parallel.strategy": name})
            workload_of(variant, machine, options, 1)
        except UserError:  # the settings do not go with it: ZeRO with Muon, FSDP2 with compute.compile=blocks
            continue
        if issubclass(kind, Single):
            continue
        layout = options.layout(variant)
        if layout.shards and layout.group == 1:
            continue
        passes = TracedPasses(variant, target, layout)
        micro = passes.fitting_size()
        memory = passes.plan(micro)
        seconds = _step_seconds(variant, machine, options, micro, steps)
        rows.append(
            StrategyPlan(
                strategy=name,
                micro_size=micro,
                rank_bytes=memory.total_bytes,
                waterfall=memory.waterfall,
                fits=passes.fits(micro) if passes.limit else None,
                step_seconds=seconds,
                speedup=1.0,
                most_parameters=_most_parameters(memory, passes.limit, passes.run),
            )
        )
    # One device is compared at the largest micro-batch of them all.
    largest = max((row.micro_size for row in rows), default=1)
    alone = _step_seconds(run, machine, replace(options, gpus=1, nodes=0), largest, steps)
    return [replace(row, speedup=alone / row.step_seconds) for row in rows]


def _step_seconds(run: Run, machine: Machine, options: PlanOptions, micro_size: int, steps: int) -> float:
    return busy_seconds(run, workload_of(run, machine, options, micro_size, steps=steps), machine)


def _most_parameters(memory: MemoryPlan, limit: int, run: Run) -> int:
    """The model's size times the room for what grows with it."""
    states = sum(memory.waterfall.get(name, 0) for name in STATES)
    room = limit - (memory.total_bytes - states)
    return round(parameters(run.model).total * room / states) if room > 0 and states else 0


def recommendation(rows: Sequence[StrategyPlan], devices: int) -> str:
    """The fastest strategy that fits; of two alike, the first in the table."""
    fitting = [row for row in rows if row.fits is not False]
    if not fitting:
        return "none fits: a larger card, more devices, or a setting below"
    best = min(fitting, key=lambda row: (round(row.step_seconds / fitting[0].step_seconds, 2), rows.index(row)))
    text = f"parallel.strategy={best.strategy}: {best.speedup:.2f} x on {devices} devices (estimate)"
    larger = max(rows, key=lambda row: row.most_parameters)
    if 0 < best.most_parameters < larger.most_parameters:
        most = units.count(float(f"{best.most_parameters:.1g}"))
        text += f"; {larger.strategy} is needed above about {most} parameters"
    refused = [row.strategy for row in rows if row.fits is False]
    return f"{text}; {', '.join(refused)} would not fit" if refused else text
