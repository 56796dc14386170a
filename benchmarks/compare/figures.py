"""The figures of a trial, and their medians over trials."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from compare.table import spread

Trial = Mapping[str, Any]  # what a trial printed


def figures(trial: Trial, warmup: int) -> dict[str, float]:
    """Figures of one trial. Rates and means exclude warm-up steps."""
    seconds, cpu, units = (trial[key][warmup:] for key in ("step_seconds", "step_cpu_seconds", "step_units"))
    row = {
        "units_per_second": sum(units) / sum(seconds),
        "seconds_per_step": statistics.mean(seconds),
        "cpu_seconds_per_step": statistics.mean(cpu),
        "training_seconds": sum(trial["step_seconds"]),
        # In excess of a median step: compiling, and other one-time work.
        "first_step_seconds": max(0.0, trial["step_seconds"][0] - statistics.median(seconds)),
        "peak_bytes": float(trial["peak_bytes"]),
        "peak_bytes_beyond_imports": float(trial["peak_bytes"] - trial["peak_bytes_after_imports"]),
    }
    row |= {key: trial[key] for key in ("startup_seconds", "process_seconds") if key in trial}
    if trial.get("curve"):
        last = trial["curve"][-1]
        row |= {"trained_tokens": last["tokens"], "last_bits_per_byte": last["bits_per_byte"]}
    if trial.get("figures"):
        counted = trial["figures"][warmup:]
        for name, last in counted[-1].items():
            row |= {f"last_{name}": last, f"mean_{name}": statistics.mean(step[name] for step in counted)}
    return row


def summary(trials: Mapping[str, Sequence[Trial]], warmup: int) -> dict[str, Any]:
    """Median and range of each figure over each contestant's trials, and its configuration."""
    medians: dict[str, Any] = {}
    for name, runs in trials.items():
        rows = [figures(trial, warmup) for trial in runs]
        medians[name] = {figure: spread([row[figure] for row in rows]) for figure in rows[0]}
        medians[name] |= {"options": runs[0]["options"], "settings": runs[0].get("settings", {})}
    return medians


def complete_rounds(record: Mapping[str, Any], setting: str) -> dict[str, Sequence[Trial]]:
    """Each contestant's trials, cut to the number that all contestants have."""
    trials = record[setting]["trials"]
    num_rounds = min(map(len, trials.values()))
    return {name: runs[:num_rounds] for name, runs in trials.items()}
