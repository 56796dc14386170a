"""Pretraining beside other trainers: the table, the goals, and what to know before they are read."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from penjing.bench.comparison import OURS, Benchmark, BenchmarkRequest, Prepared
from penjing.bench.record import rounds
from penjing.bench.table import MEBIBYTE
from penjing.bench.verdict import middle, ratios

Curve = Sequence[Mapping[str, float]]
OURS_ADAMW = "penjing-adamw"  # penjing with the baselines' optimizer, for what the step alone does
TRIAL = "penjing.bench.penjing_trial pretrain"
GOALS_SECONDS = 600.0  # of training that the goals are for
LIMIT_FRACTION = 0.7  # goal on a CPU: of the GEMM roofline
RATES = (
    "learning rates: Muon's were searched for at the 26M shape (docs/log.md, one seed), AdamW's was not; "
    "--search-rates searches both in the same way"
)
SEARCHED = "learning rates: searched in the same way for each"
OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW", "adamw_torch_fused": "AdamW"}


class Pretrain(Benchmark):
    """Two settings. path: each goes its own way from text to a trained model; step: all get the same packed rows.

    Speed and memory are compared with the same optimizer; time to the same loss with penjing's own recipe.
    """

    method = "pretrain"
    unit = "tokens"
    settings: ClassVar = {"path": "own path from text to loss", "step": "one step on identical rows"}
    ours: ClassVar = {OURS: TRIAL, OURS_ADAMW: f"{TRIAL} adamw"}
    same_optimizer = OURS_ADAMW
    tuned = True
    goals: ClassVar = {
        "trainer": {"units_per_second": 3.0, "peak_bytes": 0.6, "time_to_equal": 0.25},
        "trainer-packed": {"units_per_second": 1.2, "peak_bytes": 0.6, "time_to_equal": 0.25},
        "minimind-style": {"units_per_second": 4.0, "peak_bytes": 0.6, "time_to_equal": 0.25},
    }
    labels: ClassVar = {
        "units_per_second": ("tokens/s, padding not counted", lambda value: f"{value:,.0f}"),
        "peak_bytes": ("peak memory, MiB", lambda value: f"{value / MEBIBYTE:,.0f}"),
        "startup_seconds": ("start-up, s", lambda value: f"{value:.1f}"),
        "first_step_seconds": ("compiling and first step, s", lambda value: f"{value:.1f}"),
        "trained_tokens": ("tokens learned from", lambda value: f"{value:,.0f}"),
        "last_bits_per_byte": ("final bits per byte", lambda value: f"{value:.3f}"),
    }

    def prepare(self, work: Path, request: BenchmarkRequest) -> Prepared:
        from penjing.bench.pretrain_data import prepare

        return prepare(work, request)

    def heading(self, record: Mapping[str, Any], setting: str, name: str) -> str:
        """With the optimizer, where the record has it."""
        one = record[setting]["medians"][name]
        options = (text for text in one["options"] if text.startswith("optim"))
        optimizer = one.get("settings", {}).get("optimizer") or next(options, "").rpartition("=")[2]
        return f"{name} ({OPTIMIZERS.get(optimizer, optimizer)})" if optimizer else name

    def more_rows(self, record: Mapping[str, Any], setting: str) -> list[list[str]]:
        names = list(record[setting]["medians"])
        rows = []
        if limit := _limit(record):
            speeds = [record[setting]["medians"][name]["units_per_second"]["median"] for name in names]
            rows.append(
                [f"fraction of the GEMM roofline, {limit:,.0f} tokens/s", *[f"{it / limit:.2f}" for it in speeds]]
            )
        if setting == "path":
            curves = {name: [one["curve"] for one in trials] for name, trials in rounds(record, setting).items()}
            found = [equal_time(dict(zip(names, each, strict=True))) for each in zip(*curves.values(), strict=True)]
            label = f"bits per byte after {statistics.median(seconds for seconds, _ in found):.0f} s in all"
            rows.append([label, *[_shown([bits[name] for _, bits in found], "{:.3f}") for name in names]])
            for mine in (OURS_ADAMW, OURS):
                cells = [
                    "" if name in self.ours else _shown(times_to_equal(record, mine, name), "{:.2f} x")
                    for name in names
                ]
                rows.append([f"time of {self.heading(record, setting, mine)} to the same final bits per byte", *cells])
        return rows

    def goal_ratios(self, record: Mapping[str, Any], baseline: str, figure: str) -> tuple[str, list[float | None]]:
        if figure == "time_to_equal":
            return OURS, times_to_equal(record, OURS, baseline)
        return super().goal_ratios(record, baseline, figure)

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        medians, lines = record["path"]["medians"], []
        if record["options"]["seconds"] < GOALS_SECONDS:
            lines.append(f"the goals are for {GOALS_SECONDS:g} s of training and a model of 26M; this was shorter")
        trainers = [name for name in medians if name.startswith("trainer")]
        if trainers:
            faster = max(trainers, key=lambda name: float(medians[name]["units_per_second"]["median"]))
            ratio = middle(ratios(record, "path", OURS_ADAMW, faster, "units_per_second"))
            ours = self.heading(record, "path", OURS_ADAMW)
            lines.append(f"the faster Trainer here is {faster}: {ours} makes {ratio:.2f} x its tokens/s")
        lines.append(SEARCHED if record["options"].get("search") else RATES)
        if (limit := _limit(record)) and record["machine"]["device"] == "cpu":
            got = medians[OURS_ADAMW]["units_per_second"]["median"] / limit
            reached = "reached" if got >= LIMIT_FRACTION else "missed"
            lines.append(f"fraction of the GEMM roofline: {got:.2f}; goal at least {LIMIT_FRACTION:g}: {reached}")
        return lines


def _limit(record: Mapping[str, Any]) -> float:
    """Tokens a second of a step that is matmuls alone, at the rate of one; 0 where that was not measured."""
    return float(record.get("machine", {}).get("limit_tokens_per_second", 0.0))


def _shown(values: list[float | None], form: str) -> str:
    got = middle(values)
    return "not reached" if got is None else form.format(got)


def equal_time(curves: Mapping[str, Curve]) -> tuple[float, dict[str, float | None]]:
    """The wall time that all curves reach, and bits per byte of each there. Start-up is in it; evaluations are joined
    by straight lines."""
    common = min(curve[-1]["seconds"] for curve in curves.values())
    return common, {name: _at(curve, common) for name, curve in curves.items()}


def _at(curve: Curve, seconds: float) -> float | None:
    for one, other in pairwise(curve):
        if one["seconds"] <= seconds <= other["seconds"]:
            share = (seconds - one["seconds"]) / ((other["seconds"] - one["seconds"]) or 1.0)
            return one["bits_per_byte"] + share * (other["bits_per_byte"] - one["bits_per_byte"])
    return curve[-1]["bits_per_byte"] if curve[-1]["seconds"] == seconds else None


def times_to_equal(record: Mapping[str, Any], mine: str, baseline: str) -> list[float | None]:
    """Of each round."""
    trials = rounds(record, "path")
    pairs = zip(trials[mine], trials[baseline], strict=True)
    return [time_to_equal(ours["curve"], theirs["curve"]) for ours, theirs in pairs]


def time_to_equal(mine: Curve, theirs: Curve) -> float | None:
    """Seconds until `mine` is at the final bits per byte of `theirs`, over all of theirs; None: it never is."""
    bits = theirs[-1]["bits_per_byte"]
    for one, other in pairwise(mine):
        if other["bits_per_byte"] <= bits:
            share = (one["bits_per_byte"] - bits) / (one["bits_per_byte"] - other["bits_per_byte"])
            return (one["seconds"] + share * (other["seconds"] - one["seconds"])) / theirs[-1]["seconds"]
    return None
