"""Predictions held against outcomes, term by term; the history of this user's runs on this machine; drift."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penjing.plan.run_estimate import PARTS
from penjing.plan.step_time import quantile
from penjing.plan.user_dir import home

DRIFT_RUNS = 5  # the newest runs on a machine that are looked at
DRIFT_SHARE = 0.05  # median error of their time from which on the profile is out of date


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, planned and as it came. `unit`: seconds, bytes, tokens or tokens per second."""

    name: str
    unit: str
    predicted: float
    actual: float

    @property
    def error(self) -> float | None:
        """(predicted - actual) / actual; None where nothing came of it."""
        return (self.predicted - self.actual) / self.actual if self.actual else None


def compare(plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[Comparison]:
    """Every term that both sides know. A run that did not end is held against the share of the plan that it did."""
    done = float(outcome.get("steps_done", plan["steps"])) / max(1, int(plan["steps"]))
    terms = []

    def add(name: str, unit: str, predicted: Any, actual: Any) -> None:
        if predicted is not None and actual is not None and (predicted or actual):
            terms.append(Comparison(name, unit, float(predicted), float(actual)))

    whole = plan["predicted_seconds"] * done
    add("time", "seconds", whole, outcome.get("seconds"))
    parts = plan.get("parts_seconds", {})
    for part in PARTS:
        if part in parts:
            add(f"  {part}", "seconds", parts[part] * done, outcome.get(f"{part}_seconds"))
    waits = [seconds for name, seconds in plan.get("step_parts_seconds", {}).items() if name != "compute"]
    if waits:
        add("  waiting for data", "seconds", sum(waits) * plan["steps"] * done, outcome.get("data_wait_seconds"))
    if outcome.get("refit_seconds") and done == 1:
        add("time, re-fit (L3)", "seconds", outcome["refit_seconds"], outcome.get("seconds"))
    if plan.get("startup_seconds") and outcome.get("this_process_seconds") and not outcome.get("resumed"):
        add("wall, start-up with it", "seconds", whole + plan["startup_seconds"], outcome["this_process_seconds"])
    add("peak memory", "bytes", plan.get("predicted_peak_memory_bytes"), outcome.get("peak_memory_bytes"))
    add("tokens", "tokens", plan.get("tokens", 0) * done, outcome.get("tokens"))
    add("speed", "tokens per second", plan.get("tokens_per_second"), outcome.get("tokens_per_second"))
    loss = plan.get("predicted_loss")
    add("validation loss", "nats per token", loss, outcome.get("val_loss"))
    return terms


@dataclass(frozen=True, kw_only=True)
class HistoryRecord:
    """A line of the ledger. Errors are (predicted - actual) / actual."""

    run: str
    when: str  # UTC, ISO 8601
    machine: str
    torch: str
    level: str
    ended: str  # done, or what stopped it
    predicted_seconds: float
    seconds: float
    time_error: float | None
    in_interval: bool
    peak_error: float | None
    refit_error: float | None


def entry(run: str, when: str, plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> HistoryRecord:
    """What a run adds to the ledger."""
    errors = {term.name.strip(): term for term in compare(plan, outcome)}
    time, peak, refit = (errors.get(name) for name in ("time", "peak memory", "time, re-fit (L3)"))
    actual = time.actual if time else 0.0
    share = float(outcome.get("steps_done", plan["steps"])) / max(1, int(plan["steps"]))
    low, high = (plan.get(f"predicted_seconds_{end}", 0.0) * share for end in ("low", "high"))
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


def ledger_path() -> Path:
    return home() / "ledger.jsonl"


def append(one: HistoryRecord) -> None:
    """Add a line; the file is never rewritten."""
    path = ledger_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(one), ensure_ascii=False) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())  # one call: lines of runs that end together do not mix
    finally:
        os.close(handle)


def read_history() -> list[HistoryRecord]:
    """All lines, oldest first; those of other versions that lack a field are left out."""
    path = ledger_path()
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(HistoryRecord(**json.loads(line)))
        except (TypeError, json.JSONDecodeError):
            continue
    return found


def log_errors(entries: Sequence[HistoryRecord], machine: str) -> list[float]:
    """log(actual / predicted) of the time of the runs on a machine that ended, oldest first."""
    return [-math.log1p(each.time_error) for each in _ended(entries, machine) if each.time_error is not None]


def _ended(entries: Sequence[HistoryRecord], machine: str) -> list[HistoryRecord]:
    """Those on a machine that ended: a stopped one may have waited for anything."""
    return [
        each for each in entries if each.machine == machine and each.ended == "done" and each.time_error is not None
    ]


def recent_bias(entries: Sequence[HistoryRecord], machine: str) -> str:
    """What to say where the newest plans on a machine missed; empty where they did not, or are few."""
    mine = _ended(entries, machine)
    newest = mine[-DRIFT_RUNS:]
    if len(newest) < DRIFT_RUNS:
        return ""
    errors = [each.time_error or 0.0 for each in newest]
    middle = quantile([abs(error) for error in errors], 0.5)
    if middle <= DRIFT_SHARE:
        return ""
    way = "too short" if quantile(errors, 0.5) < 0 else "too long"
    versions = sorted({each.torch for each in mine})
    changed = f" (torch went through {', '.join(versions)})" if len(versions) > 1 else ""
    return (
        f"the last {len(newest)} plans on {machine} were {middle:.0%} off, {way}{changed}; "
        "run `penjing plan profile`, and see what else runs here"
    )
