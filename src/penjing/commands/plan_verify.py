"""Hold a plan against what came of it: penjing plan verify runs/x, and penjing plan history."""

from __future__ import annotations

import io
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import read_json, write_json
from penjing.base.markup import marked
from penjing.parallel.base import Strategy
from penjing.plan import cost, hardware
from penjing.plan import prediction_history as ledger
from penjing.plan.device_model import LEVELS
from penjing.plan.gpu_specs import card_called
from penjing.plan.run_estimate import Bill
from penjing.plan.step_time import quantile
from penjing.train.build import PreparedRun
from penjing.train.oom_recovery import is_out_of_memory
from penjing.train.run_dir import RunFolder
from penjing.train.signals import Stopped

ENDED = "ended.json"  # of a run that did not reach its last step: how far it came, and why
SPENT = ("training_seconds", "validation_seconds", "checkpoint_seconds", "sample_seconds")


def time_line(bill: Bill) -> str:
    """The time with its interval and level, and the speed."""
    low, high = units.duration(bill.predicted_seconds_low), units.duration(bill.predicted_seconds_high)
    level = f"{bill.level}, {LEVELS[bill.level]}" if bill.level in LEVELS else bill.level
    speed = units.count(float(f"{bill.tokens_per_second:.3g}"))
    return f"{units.duration(bill.predicted_seconds)} ({low} to {high}; {level}) at {speed} tokens/s"


def step_line(bill: Bill) -> str:
    """What a step is spent on, and what the run is spent on beside steps."""
    step = sum(bill.step_parts_seconds.values())
    shares = ", ".join(
        f"{name.replace('_', ' ')} {seconds / step:.0%}"
        for name, seconds in bill.step_parts_seconds.items()
        if step and seconds / step >= 0.005
    )
    rest = ", ".join(
        f"{name} {units.duration(seconds)}"
        for name, seconds in bill.parts_seconds.items()
        if name != "training" and seconds >= 0.05
    )
    return f"{bill.step_seconds * 1e3:.4g} ms: {shares}" + (f"; beside steps: {rest}" if rest else "")


def money_lines(bill: Bill, strategy: Strategy) -> list[tuple[str, str]]:
    """Cost, where a price is known, and energy."""
    devices = strategy.world
    card = card_called(torch.cuda.get_device_name(strategy.device)) if strategy.device.type == "cuda" else None
    known = cost.price_of(card.name) if card else None
    watts = card.watts if card else 0.0
    energy = cost.kilowatt_hours(bill.predicted_seconds, devices, watts, hardware.physical_cores())
    lines = [("energy", f"{energy:.2g} kWh (estimate)")]
    if known is not None:
        amount = cost.cost(known, bill.predicted_seconds, devices)
        lines.insert(0, ("cost", f"{amount} at {known.hour} an hour, {known.source}"))
    return lines


def unseen(console: Console) -> Console:
    """Where a trial's samples go: nowhere. On other ranks than 0 the console is silent already, and stays so."""
    return console if console.quiet else Console(file=io.StringIO())


def keep_score(prepared: PreparedRun, seconds: float, error: BaseException | None = None) -> None:
    """Add the run to the ledger, also one that stopped; of that, write down how far it came. Never raises."""
    strategy = prepared.context.strategy
    if strategy.rank != 0 or prepared.state.step == prepared.resumed_from:
        return
    folder = prepared.folder
    try:
        if error is None:
            (folder.path / ENDED).unlink(missing_ok=True)
            outcome = read_json(folder.outcome)
        else:
            outcome = _stopped(prepared, seconds, error)
            write_json(folder.path / ENDED, outcome)
        plan = read_json(folder.plan)
        ledger.append(ledger.entry(str(folder.path.resolve()), _now(), plan, outcome))
    except (OSError, UserError) as wrong:  # a full disk, a read-only home: the run itself is what counts
        warnings.warn(f"not in the ledger: {wrong}", stacklevel=2)


def _stopped(prepared: PreparedRun, seconds: float, error: BaseException) -> dict[str, Any]:
    totals = prepared.context.meter.totals()
    kind = "out of memory" if is_out_of_memory(error) else "stopped" if isinstance(error, Stopped) else "failed"
    return {
        "ended": "interrupted" if isinstance(error, KeyboardInterrupt) else kind,
        "why": f"{type(error).__name__}: {error}"[:500],
        "steps_done": prepared.state.step,
        "seconds": sum(value or 0.0 for name, value in totals.items() if name in SPENT),
        "this_process_seconds": seconds,
        **totals,
        "peak_memory_bytes": hardware.peak_memory_bytes(prepared.context.strategy.device),
        "resumed": prepared.resumed,
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def verify(path: Path, console: Console) -> list[ledger.Term]:
    """Print prediction against outcome, from plan.json and outcome.json alone; returns the terms.

    Raises UserError if there is no plan, or the run has not ended in any way.
    """
    folders = [folder for folder in (path, path / "pretrain", path / "sft") if RunFolder(folder).plan.is_file()]
    if not folders:
        raise UserError("no plan.json", where=path, wanted="a run of `penjing train` or `penjing quickstart`")
    terms: list[ledger.Term] = []
    for folder in folders:
        terms += _verify_one(RunFolder(folder), console)
    return terms


def _verify_one(folder: RunFolder, console: Console) -> list[ledger.Term]:
    plan = read_json(folder.plan)
    ended = folder.outcome if folder.outcome.is_file() else folder.path / ENDED
    if not ended.is_file():
        raise UserError("has not ended yet", where=folder.path, wanted=f"{folder.outcome.name} or {ENDED}")
    outcome = read_json(ended)
    level = str(plan.get("level", ""))
    terms = ledger.compare(plan, outcome)
    title = f"{folder.path}: planned at {level}, {LEVELS.get(level, 'an older version')}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("", "planned", "came", "error"):
        table.add_column(heading, justify="left" if not heading else "right")
    for term in terms:
        error = "" if term.error is None else f"{term.error:+.1%}"
        table.add_row(term.name, _shown(term.predicted, term.unit), _shown(term.actual, term.unit), error)
    console.print(table)
    low, high = plan.get("predicted_seconds_low"), plan.get("predicted_seconds_high")
    if "ended" in outcome:
        done = f"{outcome['ended']} after step {outcome['steps_done']} of {plan['steps']}"
        console.print(f"  {done}: that share of the plan is shown", highlight=False)
    elif low is not None and high is not None:
        inside = "inside" if low <= outcome["seconds"] <= high else "outside"
        span = f"{units.duration(low)} to {units.duration(high)}"
        console.print(f"  the time fell {inside} the interval {span}, as four of five runs should", highlight=False)
    console.print(f"  from {folder.plan.name} and {ended.name}; error = (planned - came) / came", highlight=False)
    return terms


def _shown(value: float, unit: str) -> str:
    if unit == "seconds":
        return units.duration(value)
    if unit == "bytes":
        return units.gibibytes(value)
    return f"{value:.4f}" if unit.startswith("nats") else units.count(value)


def show_ledger(console: Console, last: int = 20) -> None:
    """Print the newest runs' errors, how good plans have been by level, and whether they drift."""
    entries = ledger.read_ledger()
    if not entries:
        raise UserError("nothing yet", where=ledger.ledger_path(), next_step="It fills with every `penjing train`.")
    table = Table(box=None, pad_edge=False)
    figures = ("planned", "took", "error", "re-fit", "peak")
    for heading in ("when", "run", "level", *figures, ""):
        table.add_column(heading, justify="right" if heading in figures else "left")
    for each in entries[-last:]:
        errors = (each.time_error, each.refit_error, each.peak_error)
        table.add_row(
            each.when[:16].replace("T", " "),
            Path(each.run).name,
            each.level,
            units.duration(each.predicted_seconds),
            units.duration(each.seconds),
            *("" if error is None else f"{error:+.1%}" for error in errors),
            "" if each.ended == "done" else each.ended,
        )
    console.print(table)
    for level in sorted({each.level for each in entries}):
        done = [each for each in entries if each.level == level and each.ended == "done"]
        off = [abs(each.time_error) for each in done if each.time_error is not None]
        if off:
            inside = sum(each.in_interval for each in done)
            console.print(
                f"{level}: {len(off)} runs, time off by {quantile(off, 0.5):.1%} (median), {quantile(off, 0.9):.1%} "
                f"(9 of 10), {max(off):.1%} at most; {inside} of {len(done)} inside their interval",
                highlight=False,
            )
    for machine in sorted({each.machine for each in entries}):
        said = ledger.drift(entries, machine)
        if said:
            console.print(marked("drift", said, indent=""))
