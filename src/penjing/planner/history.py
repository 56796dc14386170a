"""penjing plan verify and plan history: plans compared with results."""

from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.plan import prediction_history as history
from penjing.plan.device_model import LEVELS
from penjing.track.run_record import RunRecord, find_runs


def verify(path: Path, console: Console) -> list[history.Comparison]:
    """Print predicted and actual, from plan.json and outcome.json alone; returns the comparisons.

    Raises UserError if there is no plan, or the run has not ended.
    """
    records = [record for record in find_runs(path) if record.folder.plan.is_file()]
    if not records:
        raise UserError("no plan.json", where=path, wanted="a run of `penjing train` or `penjing quickstart`")
    return [term for record in records for term in _verify_one(record, console)]


def _verify_one(record: RunRecord, console: Console) -> list[history.Comparison]:
    folder, plan, outcome = record.folder, record.plan, record.outcome or record.ended
    if not outcome:
        raise UserError("has not ended yet", where=folder.path, wanted=f"{folder.outcome.name} or {folder.ended.name}")
    level = plan.text("level")
    terms = history.compare(plan.raw, outcome.raw)
    title = f"{folder.path}: planned at {level}, {LEVELS.get(level, 'an older version')}"
    rows = [
        (term.name, _formatted(term.predicted, term.unit), _formatted(term.actual, term.unit), _percent(term.error))
        for term in terms
    ]
    print_table(console, ("", "predicted>", "actual>", "error>"), rows, title=title)
    low, high = plan.number("predicted_seconds_low"), plan.number("predicted_seconds_high")
    seconds = outcome.number("seconds")
    if ended := outcome.text("ended"):
        done = f"{ended} after step {outcome.text('steps_done')} of {plan.text('steps')}"
        console.print(f"  {done}: the prediction is scaled to so many steps")
    elif low is not None and high is not None and seconds is not None:
        inside = "inside" if low <= seconds <= high else "outside"
        span = f"{units.duration(low)} to {units.duration(high)}"
        console.print(f"  the time is {inside} the interval {span}; 80 % of runs should be inside")
    file = folder.outcome if record.outcome else folder.ended
    console.print(f"  from {folder.plan.name} and {file.name}; error = (predicted - actual) / actual")
    return terms


def _formatted(value: float, unit: str) -> str:
    if unit == "seconds":
        return units.duration(value)
    if unit == "bytes":
        return units.gibibytes(value)
    return f"{value:.4f}" if unit.startswith("nats") else units.count(value)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def print_history(console: Console, last: int = 20) -> None:
    """Print the errors of the newest runs, the accuracy of plans by level, and a warning if it gets worse."""
    records = history.read_history()
    if not records:
        raise UserError("no runs yet", where=history.history_path(), next_step="Every `penjing train` adds one.")
    rows = [
        (
            record.when[:16].replace("T", " "),
            Path(record.run).name,
            record.level,
            *map(units.duration, (record.predicted_seconds, record.seconds)),
            *map(_percent, (record.time_error, record.refit_error, record.peak_error)),
            "" if record.ended == "done" else record.ended,
        )
        for record in records[-last:]
    ]
    figures = ("predicted>", "actual>", "error>", "re-fit error>", "peak error>")
    print_table(console, ("when", "run", "level", *figures, ""), rows)
    for level in sorted({record.level for record in records}):
        done = [record for record in records if record.level == level and record.ended == "done"]
        errors = [abs(record.time_error) for record in done if record.time_error is not None]
        if errors:
            p90 = np.quantile(errors, 0.9)
            inside = sum(record.in_interval for record in done)
            console.print(
                f"{level}: {len(errors)} runs, error of time {median(errors):.1%} (median), "
                f"{p90:.1%} (p90), {max(errors):.1%} (max); {inside} of {len(done)} in their interval"
            )
    for machine in sorted({record.machine for record in records}):
        if note := history.recent_bias(records, machine):
            console.print(escape_markup("drift", note, indent=""))
