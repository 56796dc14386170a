"""Pretraining compared with other trainers: table, goals and notes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from compare.comparison import OURS, Benchmark, BenchmarkRequest, Prepared
from compare.figures import complete_rounds
from compare.table import MEBIBYTE, ResultTable
from compare.verdict import median_or_none, ratios

Curve = Sequence[Mapping[str, float]]
OURS_ADAMW = "penjing-adamw"  # penjing with the baselines' optimizer, to compare the step alone
TRIAL = "compare.penjing_trial pretrain"
GOAL_SECONDS = 600.0  # training time for which the goals hold
LIMIT_FRACTION = 0.7  # goal on a CPU: of the GEMM roofline
RATES = (
    "learning rates: Muon's were searched for at the 26M shape (docs/log.md, one seed), AdamW's was not; "
    "--search-rates searches both in the same way"
)
SEARCHED = "learning rates: searched in the same way for each"
OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW", "adamw_torch_fused": "AdamW"}


class Pretrain(Benchmark):
    """Two settings. path: each trainer's own path from text to a trained model; step: all get the same packed rows.

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
        from compare.pretrain_data import prepare

        return prepare(work, request)

    def heading(self, record: Mapping[str, Any], setting: str, name: str) -> str:
        """The name with the optimizer, if the record has it."""
        stats = record[setting]["medians"][name]
        options = (text for text in stats["options"] if text.startswith("optim"))
        optimizer = stats.get("settings", {}).get("optimizer") or next(options, "").rpartition("=")[2]
        return f"{name} ({OPTIMIZERS.get(optimizer, optimizer)})" if optimizer else name

    def extra_rows(self, record: Mapping[str, Any], setting: str) -> list[list[str]]:
        names = list(record[setting]["medians"])
        rows = []
        if limit := _limit(record):
            speeds = [record[setting]["medians"][name]["units_per_second"]["median"] for name in names]
            rows.append(
                [f"fraction of the GEMM roofline, {limit:,.0f} tokens/s", *[f"{speed / limit:.2f}" for speed in speeds]]
            )
        if setting == "path":
            curves = {name: [t["curve"] for t in trials] for name, trials in complete_rounds(record, setting).items()}
            times = [equal_time(dict(zip(names, curve, strict=True))) for curve in zip(*curves.values(), strict=True)]
            label = f"bits per byte after {statistics.median(seconds for seconds, _ in times):.0f} s in all"
            rows.append([label, *[_shown([bits[name] for _, bits in times], "{:.3f}") for name in names]])
            for ours in (OURS_ADAMW, OURS):
                cells = [
                    "" if name in self.ours else _shown(times_to_equal(record, ours, name), "{:.2f} x")
                    for name in names
                ]
                rows.append([f"time of {self.heading(record, setting, ours)} to the same final bits per byte", *cells])
        return rows

    def goal_ratios(self, record: Mapping[str, Any], baseline: str, figure: str) -> tuple[str, list[float | None]]:
        if figure == "time_to_equal":
            return OURS, times_to_equal(record, OURS, baseline)
        return super().goal_ratios(record, baseline, figure)

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        medians, lines = record["path"]["medians"], []
        if record["options"]["seconds"] < GOAL_SECONDS:
            lines.append(f"the goals are for {GOAL_SECONDS:g} s of training and a model of 26M; this was shorter")
        trainers = [name for name in medians if name.startswith("trainer")]
        if trainers:
            faster = max(trainers, key=lambda name: float(medians[name]["units_per_second"]["median"]))
            ratio = median_or_none(ratios(record, "path", OURS_ADAMW, faster, "units_per_second"))
            ours = self.heading(record, "path", OURS_ADAMW)
            lines.append(f"the faster Trainer here is {faster}: {ours} makes {ratio:.2f} x its tokens/s")
        lines.append(SEARCHED if record["options"].get("search") else RATES)
        if (limit := _limit(record)) and record["machine"]["device"] == "cpu":
            got = medians[OURS_ADAMW]["units_per_second"]["median"] / limit
            reached = "reached" if got >= LIMIT_FRACTION else "missed"
            lines.append(f"fraction of the GEMM roofline: {got:.2f}; goal at least {LIMIT_FRACTION:g}: {reached}")
        return lines


def overview(records: Sequence[tuple[str, str, Mapping[str, Any], Sequence[str]]]) -> ResultTable:
    """All records in one table: (machine, link, record, settings to show); a row per record and baseline.

    Cells are medians of penjing with the baselines' optimizer over the baseline's. Memory and the share of the GEMM
    roofline are those of the first setting shown. The last ratio is with penjing's own recipe.
    """
    headings = ["machine", "parameters", "compared with", "tokens/s, own path", "tokens/s, one step", "memory"]
    headings += ["time to its final loss", "the same with Muon", "penjing's share of the GEMM roofline", "trials"]
    rows = []
    for machine, link, record, settings in records:
        medians = {setting: record[setting]["medians"] for setting in settings}
        first = medians[settings[0]]
        speed = first[OURS_ADAMW]["units_per_second"]["median"]
        for name in (each for each in first if each not in Pretrain.ours):
            speeds = [
                _ratio(medians[each], name, "units_per_second") if each in medians else "-"
                for each in Pretrain.settings
            ]
            times = ["-", "-"]
            if "path" in medians:
                times = [_shown(times_to_equal(record, ours, name), "{:.2f} x") for ours in (OURS_ADAMW, OURS)]
            size, trials = f"{record['parameters'] / 1e6:.1f}M", f"[{record['options']['trials']}]({link})"
            share = f"{speed / _limit(record):.2f}" if _limit(record) else "-"
            rows.append([machine, size, name, *speeds, _ratio(first, name, "peak_bytes"), *times, share, trials])
    return ResultTable(headings, rows)


def _ratio(medians: Mapping[str, Any], baseline: str, figure: str) -> str:
    return f"{medians[OURS_ADAMW][figure]['median'] / medians[baseline][figure]['median']:.2f} x"


def _limit(record: Mapping[str, Any]) -> float:
    """Tokens per second at the GEMM roofline, a step of matmuls only; 0 if not measured."""
    return float(record.get("machine", {}).get("limit_tokens_per_second", 0.0))


def _shown(values: list[float | None], form: str) -> str:
    got = median_or_none(values)
    return "not reached" if got is None else form.format(got)


def equal_time(curves: Mapping[str, Curve]) -> tuple[float, dict[str, float | None]]:
    """The latest wall time that all curves reach, and bits per byte of each there. Includes start-up; interpolates
    linearly between evaluations."""
    common = min(curve[-1]["seconds"] for curve in curves.values())
    return common, {name: _at(curve, common) for name, curve in curves.items()}


def _at(curve: Curve, seconds: float) -> float | None:
    for start, end in pairwise(curve):
        if start["seconds"] <= seconds <= end["seconds"]:
            fraction = (seconds - start["seconds"]) / ((end["seconds"] - start["seconds"]) or 1.0)
            return start["bits_per_byte"] + fraction * (end["bits_per_byte"] - start["bits_per_byte"])
    return curve[-1]["bits_per_byte"] if curve[-1]["seconds"] == seconds else None


def times_to_equal(record: Mapping[str, Any], contestant: str, baseline: str) -> list[float | None]:
    """`time_to_equal` of each round."""
    trials = complete_rounds(record, "path")
    pairs = zip(trials[contestant], trials[baseline], strict=True)
    return [time_to_equal(our_trial["curve"], baseline_trial["curve"]) for our_trial, baseline_trial in pairs]


def time_to_equal(curve: Curve, baseline: Curve) -> float | None:
    """Seconds until `curve` reaches the baseline's final bits per byte, over the baseline's seconds; None: never."""
    bits = baseline[-1]["bits_per_byte"]
    for start, end in pairwise(curve):
        if end["bits_per_byte"] <= bits:
            fraction = (start["bits_per_byte"] - bits) / (start["bits_per_byte"] - end["bits_per_byte"])
            return (start["seconds"] + fraction * (end["seconds"] - start["seconds"])) / baseline[-1]["seconds"]
    return None
