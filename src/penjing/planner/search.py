"""penjing plan memory and plan search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from rich.console import Console
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.model.transformer import Recompute
from penjing.plan import cost
from penjing.plan.device_model import Machine
from penjing.plan.memory.device_target import MEMORY_MARGIN, is_tight, safe_bytes
from penjing.plan.step_workload import Workload
from penjing.planner.inputs import PlanOptions, busy_seconds, find_machine, lengths_of, workload_of
from penjing.planner.page import verdict_of
from penjing.train.batch_geometry import batch_geometry
from penjing.train.config import Run
from penjing.train.memory_trace.trace import predict_memory
from penjing.train.resolve import with_settings

BAR = 40  # characters of the longest bar
MAX_TRACED = 40  # configurations of one search


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One step configuration, with its traced peak memory (bytes) and its predicted time (seconds), per device."""

    work: Workload
    micro_size: int
    peak_bytes: int
    seconds: float  # of a step
    tokens_per_second: float


def fitting_candidates(candidates: Sequence[Candidate], available_bytes: int) -> list[Candidate]:
    """The candidates that fit, fastest first. available_bytes: 0 = no limit."""
    fits = [item for item in candidates if not available_bytes or item.peak_bytes <= available_bytes]
    return sorted(fits, key=lambda item: -item.tokens_per_second)


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other of the same seq_len beats in both memory and speed; smallest memory first.

    Of two equal ones the first stays.
    """
    front: list[Candidate] = []
    for point in sorted(candidates, key=lambda item: (item.work.seq_len, item.peak_bytes, -item.tokens_per_second)):
        best = front[-1] if front else None
        if not best or best.work.seq_len != point.work.seq_len or best.tokens_per_second < point.tokens_per_second:
            front.append(point)
    return front


def print_memory(run: Run, options: PlanOptions, console: Console, *, waterfall: bool = False) -> bool | None:
    """Print the traced peak, its location and components; returns whether it fits (None: unknown)."""
    _, target, _ = find_machine(options, run)
    plan = predict_memory(run, target, layout=options.layout(run))
    of_memory = f" of {units.gibibytes(target.memory_bytes)}" if target.memory_bytes else ""
    fits = None if not target.memory_bytes else plan.total_bytes <= target.memory_bytes
    verdict = verdict_of(fits, is_tight(plan.total_bytes, target.memory_bytes))
    kind = "of tensors" if target.device.is_host else "allocated and reserved by torch"
    console.print(Text(f"{units.gibibytes(plan.total_bytes)}{of_memory} on {target.name}: ") + verdict)
    console.print(
        f"  {kind}: {units.gibibytes(plan.peak_allocated_bytes)}, {units.gibibytes(plan.peak_reserved_bytes)}; "
        f"peak: {plan.peak_at} at {plan.peak_line}, {plan.peak_phase}"
    )
    if waterfall:
        largest = max(plan.waterfall.values())
        for name, size in plan.waterfall.items():
            bar = "#" * round(BAR * size / largest)
            console.print(f"  {name:<16} {units.gibibytes(size):>10}  {bar}", markup=False)
    for note in plan.notes:
        console.print(escape_markup("note", note))
    return fits


def search(
    run: Run, options: PlanOptions, fit: str, lengths: tuple[int, ...], console: Console, *, every: bool = False
) -> int:
    """Print the Pareto table of traced configurations of a step; returns how many fit.

    Several devices share a step as in training. Raises UserError for a bad memory size, and if
    the batch size does not divide among the devices.
    """
    budget = cost.read_budget(fit, "--fit") if fit else cost.Budget()
    if fit and not budget.memory_bytes:
        raise UserError("not a size of memory", where="--fit", got=repr(fit), wanted="such as 24GB or 8GiB")
    machine, target, notes = find_machine(options, run)
    limit_bytes = budget.memory_bytes or target.memory_bytes
    unset = with_settings(run, {"batch.micro_size": 0})
    sizes = batch_geometry(unset, options.gpus, torch.device(machine.kind)).micro_sizes
    configurations = [
        (variant, rows)
        for seq_len in lengths or (run.data.seq_len,)
        for variant in _recomputing(with_settings(run, {"data.seq_len": seq_len}))
        for rows in sizes
    ]
    if len(configurations) > MAX_TRACED:
        notes.append(f"only the first {MAX_TRACED} of {len(configurations)} configurations were traced")
    traced: list[Candidate] = []
    for variant, rows in configurations[:MAX_TRACED]:
        plan = predict_memory(variant, target, micro_size=rows, layout=options.layout(run))
        traced.append(_candidate(variant, machine, options, rows, plan.total_bytes))
    fits = fitting_candidates(traced, safe_bytes(limit_bytes))
    rows_shown = []
    for one in traced if every else pareto(fits):
        how = one.micro_size, one.work.passes, one.work.seq_len, one.work.recompute, one.work.layout.strategy
        rate = units.count(float(f"{one.tokens_per_second:.3g}"))
        rows_shown.append((*how, units.gibibytes(one.peak_bytes), units.duration(one.seconds), rate))
    settings = ("micro-batch>", "accumulation>", "seq len>", "checkpointing>", "sharding>")
    title = f"{run.stage} on {options.gpus} x {machine.name}, {machine.level}"
    print_table(console, (*settings, "peak (traced)>", "step>", "tokens/s>"), rows_shown, title=title)
    limit = units.gibibytes(limit_bytes) if limit_bytes else "no known limit"
    margin = f", {MEMORY_MARGIN:.1%} of it reserved for the error of these figures" if limit_bytes else ""
    console.print(f"{len(fits)} of {len(traced)} traced configurations fit {limit}{margin}")
    if fits:
        work = fits[0].work
        shared = f", {work.layout.strategy} over {options.gpus} devices" if options.gpus > 1 else ""
        console.print(
            f"fastest: batch.micro_size={fits[0].micro_size} data.seq_len={work.seq_len} "
            f"compute.activation_checkpointing={work.recompute}{shared}"
        )
    for note in notes:
        console.print(escape_markup("note", note, indent=""))
    return len(fits)


def _recomputing(run: Run) -> list[Run]:
    """The run with each kind of activation checkpointing that it supports."""
    if run.model.is_mixture or run.lora.dropout:
        return [run]
    return [with_settings(run, {"compute.activation_checkpointing": how}) for how in get_args(Recompute)]


def _candidate(run: Run, machine: Machine, options: PlanOptions, rows: int, peak: int) -> Candidate:
    work = workload_of(run, machine, options, rows)
    seconds = busy_seconds(run, work, machine)
    rate = run.batch.size * lengths_of(run).tokens / seconds
    return Candidate(work=work, micro_size=rows, peak_bytes=peak, seconds=seconds, tokens_per_second=rate)
