"""The verdict of all benchmarks: our ratio to each baseline, by round, with the goal; and every configuration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compare.figures import complete_rounds, figures

if TYPE_CHECKING:
    from compare.comparison import Benchmark

CLAIM_TRIALS = 3  # minimum per contestant for a claim
FIGURES = {"units_per_second": "{unit}/s", "peak_bytes": "peak memory", "time_to_equal": "time to its final loss"}


def ratios(record: Mapping[str, Any], setting: str, contestant: str, baseline: str, figure: str) -> list[float | None]:
    """Ratio of a figure of `contestant` to that of `baseline`, for each round."""
    trials, warmup = complete_rounds(record, setting), record["options"]["warmup"]
    ours, baselines = ([figures(trial, warmup)[figure] for trial in trials[name]] for name in (contestant, baseline))
    return [trial / other for trial, other in zip(ours, baselines, strict=True)]


def median_or_none(values: list[float | None]) -> float | None:
    """The median; None if any value is unknown."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def verdict(benchmark: Benchmark, record: Mapping[str, Any]) -> list[str]:
    """Lines: notes, goals reached and missed, and the options of each contestant."""
    first, *others = benchmark.settings
    medians = record[first]["medians"]
    lines = benchmark.notes(record)
    if (done := len(next(iter(complete_rounds(record, first).values())))) < CLAIM_TRIALS:
        lines.append(f"{done} trial{'s' if done > 1 else ''} of each: a claim needs {CLAIM_TRIALS}")
    for name, trials in record[first]["trials"].items():
        if len({str(trial.get("settings")) for trial in trials}) > 1:
            lines.append(f"{name}: its trials ran with different settings, so the medians say little")
    for baseline, goals in record["goals"].items():
        if baseline in medians:
            lines += [_goal(benchmark, record, baseline, figure, goal) for figure, goal in goals.items()]
    for name, stats in medians.items():
        lines.append(f"{name}: {', '.join(stats['options'])}")
        for setting in others:
            options = record[setting]["medians"].get(name, stats)["options"]
            if options != stats["options"]:
                lines.append(f"{name}, {benchmark.settings[setting]}: {', '.join(options)}")
    return lines


def _goal(benchmark: Benchmark, record: Mapping[str, Any], baseline: str, figure: str, goal: float) -> str:
    ours, values = benchmark.goal_ratios(record, baseline, figure)
    got, at_least = median_or_none(values), figure == "units_per_second"
    reached = got is not None and (got >= goal if at_least else got <= goal)
    known = [value for value in values if value is not None]
    shown = "-" if got is None else f"{got:.2f} x" + (f" ({min(known):.2f}-{max(known):.2f})" if len(known) > 1 else "")
    what = FIGURES[figure].format(unit=benchmark.unit)
    return (
        f"{ours} / {baseline}, {what}: {shown}; goal {'at least' if at_least else 'at most'} {goal:g} x: "
        f"{'reached' if reached else 'missed'}"
    )
