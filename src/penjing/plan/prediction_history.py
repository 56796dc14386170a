"""Compare predictions with outcomes, term by term; keep this user's history of runs; detect drift."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penjing.base.untrusted import Fields
from penjing.base.user_dir import user_dir
from penjing.plan.run_estimate import PARTS

DRIFT_RUNS = 5  # number of newest runs on a machine to check
DRIFT_SHARE = 0.05  # median error of their time above which the profile is out of date


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, predicted and actual. `unit`: seconds, bytes, tokens or tokens per second."""

    name: str
    unit: str
    predicted: float
    actual: float

    @property
    def error(self) -> float | None:
        """(predicted - actual) / actual; None if actual is 0."""
        return (self.predicted - self.actual) / self.actual if self.actual else None


def compare(planned: Mapping[str, Any], ended: Mapping[str, Any]) -> list[Comparison]:
    """Every term that both know. An unfinished run is compared with the fraction of the plan that it completed."""
    plan, outcome, terms, done = Fields(planned), Fields(ended), [], share_done(planned, ended)

    def add(name: str, unit: str, predicted: float | None, actual: float | None) -> None:
        if predicted is not None and actual is not None and (predicted or actual):
            terms.append(Comparison(name, unit, predicted, actual))

    seconds, actual = (plan.number("predicted_seconds") or 0) * done, outcome.number("seconds")
    add("time", "seconds", seconds, actual)
    parts, step_parts = plan.fields("parts_seconds"), plan.fields("step_parts_seconds")
    for part in PARTS:
        if (predicted := parts.number(part)) is not None:
            add(f"  {part}", "seconds", predicted * done, outcome.number(f"{part}_seconds"))
    if waits := [step_parts.number(name) or 0 for name in step_parts.raw if name != "compute"]:
        steps = (plan.number("steps") or 0) * done
        add("  waiting for data", "seconds", sum(waits) * steps, outcome.number("data_wait_seconds"))
    if (refit := outcome.number("refit_seconds")) and done == 1:
        add("time, re-fit (L3)", "seconds", refit, actual)
    startup, wall = plan.number("startup_seconds"), outcome.number("this_process_seconds")
    if startup and wall and not outcome.number("resumed"):
        add("wall, start-up with it", "seconds", seconds + startup, wall)
    add("peak memory", "bytes", plan.number("predicted_peak_memory_bytes"), outcome.number("peak_memory_bytes"))
    add("tokens", "tokens", (plan.number("tokens") or 0) * done, outcome.number("tokens"))
    add("speed", "tokens per second", plan.number("tokens_per_second"), outcome.number("tokens_per_second"))
    add("held-out loss", "nats per token", plan.number("predicted_loss"), outcome.number("val_loss"))
    return terms


def share_done(plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> float:
    """The fraction of the planned steps that the run completed."""
    steps, done = Fields(plan).number("steps"), Fields(outcome).number("steps_done")
    return 1.0 if done is None or steps is None else done / max(1.0, steps)


@dataclass(frozen=True, kw_only=True)
class HistoryRecord:
    """A line of ledger.jsonl. Errors are (predicted - actual) / actual."""

    run: str
    when: str  # UTC, ISO 8601
    machine: str
    torch: str
    level: str
    ended: str  # "done", or the reason it stopped
    predicted_seconds: float
    seconds: float
    time_error: float | None
    in_interval: bool
    peak_error: float | None
    refit_error: float | None


def entry(run: str, when: str, plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> HistoryRecord:
    """The history record of a run."""
    errors = {term.name.strip(): term for term in compare(plan, outcome)}
    time, peak, refit = (errors.get(name) for name in ("time", "peak memory", "time, re-fit (L3)"))
    actual = time.actual if time else 0.0
    done = share_done(plan, outcome)
    low, high = (plan.get(f"predicted_seconds_{end}", 0.0) * done for end in ("low", "high"))
    return HistoryRecord(
        run=run,
        when=when,
        machine=str(plan.get("machine", "")),
        torch=str(plan.get("versions", {}).get("torch", "")),
        level=str(plan.get("level", "")),
        ended=str(outcome.get("ended", "done")),
        predicted_seconds=time.predicted if time else 0.0,
        seconds=actual,
        time_error=time.error if time else None,
        in_interval=low <= actual <= high,
        peak_error=peak.error if peak else None,
        refit_error=refit.error if refit else None,
    )


def history_path() -> Path:
    return user_dir() / "ledger.jsonl"


def append(record: HistoryRecord) -> None:
    """Append a line; the file is never rewritten."""
    path = history_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(record)) + "\n"  # ASCII: a folder's name may be no UTF-8
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())  # one call, so that lines of runs that end at the same time do not interleave


def read_history() -> list[HistoryRecord]:
    """All records, oldest first; records of other versions that lack a field are skipped."""
    path = history_path()
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(HistoryRecord(**json.loads(line)))
        except (TypeError, json.JSONDecodeError):
            continue
    return records


def log_errors(entries: Sequence[HistoryRecord], machine: str) -> list[float]:
    """log(actual / predicted) of the time of completed runs on a machine, oldest first."""
    return [-math.log1p(record.time_error) for record in _ended(entries, machine) if record.time_error is not None]


def _ended(entries: Sequence[HistoryRecord], machine: str) -> list[HistoryRecord]:
    """Completed runs on a machine. A stopped run is excluded: its time may include any wait."""
    return [run for run in entries if run.machine == machine and run.ended == "done" and run.time_error is not None]


def recent_bias(entries: Sequence[HistoryRecord], machine: str) -> str:
    """A warning if the newest plans on a machine were off; empty if they were not, or are too few."""
    completed = _ended(entries, machine)
    newest = completed[-DRIFT_RUNS:]
    if len(newest) < DRIFT_RUNS:
        return ""
    errors = [record.time_error or 0.0 for record in newest]
    median = statistics.median(map(abs, errors))
    if median <= DRIFT_SHARE:
        return ""
    direction = "too short" if statistics.median(errors) < 0 else "too long"
    versions = sorted({record.torch for record in completed})
    changed = f" (torch went through {', '.join(versions)})" if len(versions) > 1 else ""
    return (
        f"the last {len(newest)} plans on {machine} were {median:.0%} off, {direction}{changed}; "
        "run `penjing plan profile`, and see what else runs here"
    )
