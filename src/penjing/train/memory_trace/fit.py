"""The largest micro-batch whose step fits in memory, by traces: the same for a plan and, on a CPU, for training. And
whether the ranks have to share the weights."""

from __future__ import annotations

import math
import os
from bisect import bisect_left

import torch

from penjing import devices
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.devices import host
from penjing.parallel import STRATEGIES
from penjing.parallel.base import Strategy, strategy_for
from penjing.parallel.single import Single
from penjing.plan.layout import ONE_RANK, Layout
from penjing.plan.memory import MemoryPlan, Target, safe_bytes
from penjing.plan.rough_memory import rough_memory
from penjing.plan.shape import shape_of
from penjing.plan.step_workload import Workload
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import ParallelSettings, Run
from penjing.train.memory_trace import trace
from penjing.train.resolve import with_settings

# A run is traced before step 1, which takes seconds, if the rough formula times this does not fit. The formula counts
# mean lengths, and no reference model.
ROUGH_FACTOR = 4


class TracedPasses:
    """Traced memory of a run's step by micro-batch size, each size traced once."""

    def __init__(self, run: Run, target: Target, layout: Layout = ONE_RANK) -> None:
        self.run, self.target, self.layout = run, target, layout
        self.geometry = batch_geometry(run, layout.ranks, torch.device(target.kind))
        self.limit = safe_bytes(target.memory_bytes)  # 0 = unknown
        self.cap = trace.MAX_LOGITS // (run.data.seq_len * run.model.vocab_size)  # rows of a pass
        self.full = self.geometry.micro_size  # of the settings; fewer where tracing them would take minutes
        if self.limit and not run.batch.micro_size and self.full > self.cap and not target.device.is_host:
            sizes = self.geometry.micro_sizes
            self.full = next((size for size in sizes if size <= self.cap), sizes[-1])
        self._plans: dict[int, MemoryPlan] = {}

    def plan(self, rows: int) -> MemoryPlan:
        """The plan of a step with passes of so many rows."""
        if rows not in self._plans:
            self._plans[rows] = trace.predict_memory(self.run, self.target, micro_size=rows, layout=self.layout)
        return self._plans[rows]

    def of(self, run: Run) -> TracedPasses:
        """The passes of a run with other settings on the same devices."""
        return TracedPasses(run, self.target, self.layout)

    def fits(self, rows: int) -> bool:
        return self.plan(rows).total_bytes <= self.limit

    def bytes_per_row(self) -> float:
        """The slope up to the settings' micro-batch; 0 if there is no smaller one."""
        full = self.full
        fewer = next((size for size in self.geometry.micro_sizes if size < full), 0)
        return (self.plan(full).total_bytes - self.plan(fewer).total_bytes) / (full - fewer) if fewer else 0.0

    def fitting_size(self) -> int:
        """The settings' micro-batch, or the largest smaller one that fits; the smallest if none does."""
        if not self.limit or self.run.batch.micro_size or self.fits(self.full):
            return self.full
        sizes = sorted(size for size in self.geometry.micro_sizes if size <= self.full)
        return sizes[max(1, bisect_left(sizes, True, key=lambda size: not self.fits(size))) - 1]

    def largest(self) -> int:
        """About how many rows fit in one pass; 0 if no traced number does.

        Memory is the maximum of several linear functions of the rows: the optimizer's peak is constant, that of
        activations grows. So it is convex: between two traced points it is at most the chord, beyond them it may be far
        above it. The point where the extrapolated line meets the limit is therefore traced too.
        """
        fitting = max((rows for rows in self._plans if self.fits(rows)), default=0)
        if not fitting:
            return 0
        if fitting == max(self._plans):
            further = (self.limit - self.plan(fitting).total_bytes) / max(1.0, self.bytes_per_row())
            beyond = min(fitting + math.floor(further), max(fitting, self.cap))
            if self.fits(beyond):
                return beyond
        over = min(rows for rows in self._plans if rows > fitting)
        low, high = self.plan(fitting).total_bytes, self.plan(over).total_bytes
        return fitting + math.floor((over - fitting) * (self.limit - low) / (high - low))

    def reduced(self, rows: int) -> str:
        """A line for the user that the passes have fewer rows than the settings allow."""
        geometry = self.geometry
        effect = "the same gradients" if geometry.exact else "the router's auxiliary loss is computed per micro-batch"
        accumulation = geometry.micro_size * geometry.accumulation // rows
        full = units.gibibytes(self.plan(self.full).total_bytes)
        return (
            f"a micro-batch of {self.full} takes {full}; "
            f"planned with batch.micro_size={rows} and accumulation {accumulation}: {effect}"
        )


def layout_of(parallel: ParallelSettings, ranks: int, nodes: int = 1, network: float = 0.0) -> Layout:
    """How a strategy of the table shares a step. network: bytes per second of a machine; 0 = assumed."""
    name = strategy_for(ranks) if parallel.strategy == "auto" else parallel.strategy
    kind = look_up(STRATEGIES, name, what="parallel.strategy")
    if ranks > 1 and issubclass(kind, Single):
        raise UserError("works with one process", where="parallel.strategy", got=f"{name}, {ranks}", wanted="auto")
    return Layout(
        strategy=name,
        ranks=ranks,
        nodes=nodes,
        shards=kind.shards,
        reshard=parallel.reshard,
        within_node=kind.shards_within_node,
        network_bytes_per_second=network,
    )


def room(strategy: Strategy) -> tuple[Target, int]:
    """What each rank has, and the number of machines. Rank 0's memory counts: available memory changes always, and
    all ranks must decide alike."""
    device, kind = strategy.device, devices.of(strategy.device)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", strategy.world))
    free = strategy.broadcast(host.available_bytes(processes) if kind.is_host else kind.memory_bytes(device))
    name = host.cpu_name() if kind.is_host else kind.name(device)
    target = Target(kind=device.type, name=name, capability=kind.capability(device), memory_bytes=free)
    return target, max(1, strategy.world // processes)


def _surely_fits(run: Run, rows: int, available_bytes: int) -> bool:
    tokens = round(rows * run.objective.unit_lengths(run.data.seq_len).tokens)
    work = Workload(shape=shape_of(run.model), tokens=tokens, seq_len=run.data.seq_len, keys=1.0, dtype="float32")
    rough = rough_memory(work, state_bytes=run.state_bytes, context_bytes=0, on_host=True)
    return ROUGH_FACTOR * sum(rough.values()) < available_bytes


def automatic_strategy(run: Run, target: Target, ranks: int, nodes: int = 1) -> tuple[str, str]:
    """What `parallel.strategy=auto` means on devices like `target`, and why: fsdp2 where traces show that a step fits
    with it, and not with the whole model on each; else ddp."""
    whole, why = strategy_for(ranks), f"{ranks} process{'es' * (ranks > 1)}"
    rows = run.batch.micro_size or run.objective.indivisible_units
    if ranks == 1 or not target.memory_bytes or _surely_fits(run, rows, target.memory_bytes):
        return whole, why
    if run.compute.compile not in ("auto", "off"):  # fsdp2 is not compiled
        return whole, why
    needed = []
    for name in (whole, "fsdp2"):
        try:
            variant = with_settings(run, {"parallel.strategy": name})
            passes = TracedPasses(variant, target, layout_of(variant.parallel, ranks, nodes))
            needed.append(passes.plan(passes.fitting_size()).total_bytes)
        except UserError:  # a run that cannot be traced
            return whole, why
        if needed[-1] <= passes.limit:
            break
    else:
        return whole, f"{why}; fsdp2 would not fit either"
    if name == whole:
        return whole, why
    took, free = map(units.gibibytes, (needed[0], target.memory_bytes))
    return name, f"{whole} takes {took} of the {free} of each process, {name} {units.gibibytes(needed[1])} (estimates)"


def fit_memory(run: Run, strategy: Strategy) -> tuple[int, str]:
    """On a CPU, the micro-batch that the run's plan has, and why; 0 if it is that of the settings.

    A GPU raises an error when its memory is full, after which passes become smaller; on a CPU the system ends the
    process. Raises UserError if the run does not fit.
    """
    if not devices.of(strategy.device).is_host:
        return 0, ""
    target, nodes = room(strategy)
    share = target.memory_bytes
    micro = batch_geometry(run, strategy.world, strategy.device).micro_size
    if not share or _surely_fits(run, micro, share):
        return 0, ""
    try:
        trace.check_size(run, micro, on_host=True)
    except UserError:  # nobody knows before it is trained
        return 0, ""
    named = with_settings(run, {"parallel.strategy": strategy.name})
    passes = TracedPasses(run, target, layout_of(named.parallel, strategy.world, nodes))
    rows = strategy.broadcast(passes.fitting_size() if strategy.rank == 0 else None)
    total = passes.plan(rows).total_bytes
    if total > share:
        raise UserError(
            f"the run does not fit in memory with a micro-batch of {rows}",
            where="memory of each process" if strategy.world > 1 else "memory",
            got=f"{units.gibibytes(total)} (estimate)",
            wanted=f"at most {units.gibibytes(share)}, which are free now",
            next_step="Use a smaller model or data.seq_len, or unset batch.micro_size; try `penjing plan memory`.",
        )
    return (0, "") if rows == micro else (rows, passes.reduced(rows))
