"""The one verdict: ours over each baseline, round by round, beside the goal; and what everyone ran with."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penjing.bench.record import figures, rounds

if TYPE_CHECKING:
    from penjing.bench.comparison import Benchmark

CLAIM_TRIALS = 3  # of each contestant, for a claim
FIGURES = {"units_per_second": "{unit}/s", "peak_bytes": "peak memory", "time_to_equal": "time to its final loss"}


def ratios(record: Mapping[str, Any], setting: str, mine: str, baseline: str, figure: str) -> list[float | None]:
    """Of each round, a figure of one contestant over that of another."""
    trials, warmup = rounds(record, setting), record["options"]["warmup"]
    ours, theirs = ([figures(one, warmup)[figure] for one in trials[name]] for name in (mine, baseline))
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def middle(values: list[float | None]) -> float | None:
    """The median; None if one is not known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def verdict(benchmark: Benchmark, record: Mapping[str, Any]) -> list[str]:
    """Lines: notes, goals reached and missed, and the options of each contestant."""
    first, *others = benchmark.settings
    medians = record[first]["medians"]
    lines = benchmark.notes(record)
    if (done := len(next(iter(rounds(record, first).values())))) < CLAIM_TRIALS:
        lines.append(f"{done} trial{'s' if done > 1 else ''} of each: a claim needs {CLAIM_TRIALS}")
    for name, trials in record[first]["trials"].items():
        if len({str(one.get("settings")) for one in trials}) > 1:
            lines.append(f"{name}: its trials ran with different settings, so the medians say little")
    for baseline, goals in record["goals"].items():
        if baseline in medians:
            lines += [_goal(benchmark, record, baseline, figure, wanted) for figure, wanted in goals.items()]
    for name, each in medians.items():
        lines.append(f"{name}: {', '.join(each['options'])}")
        for setting in others:
            options = record[setting]["medians"].get(name, each)["options"]
            if options != each["options"]:
                lines.append(f"{name}, {benchmark.settings[setting]}: {', '.join(options)}")
    return lines


def _goal(benchmark: Benchmark, record: Mapping[str, Any], baseline: str, figure: str, wanted: float) -> str:
    mine, values = benchmark.goal_ratios(record, baseline, figure)
    got, at_least = middle(values), figure == "units_per_second"
    reached = got is not None and (got >= wanted if at_least else got <= wanted)
    known = [value for value in values if value is not None]
    shown = "-" if got is None else f"{got:.2f} x" + (f" ({min(known):.2f}-{max(known):.2f})" if len(known) > 1 else "")
    what = FIGURES[figure].format(unit=benchmark.unit)
    return (
        f"{mine} / {baseline}, {what}: {shown}; goal {'at least' if at_least else 'at most'} {wanted:g} x: "
        f"{'reached' if reached else 'missed'}"
    )
