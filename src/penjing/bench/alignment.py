"""DPO and GRPO beside TRL: one model, the same data in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from penjing.bench.comparison import OURS, Benchmark, BenchmarkRequest, Options, Prepared
from penjing.bench.record import rounds
from penjing.bench.table import MEBIBYTE
from penjing.bench.trial_spec import AlignmentSpec


class _Alignment(Benchmark):
    settings: ClassVar = {"step": "steps on identical data"}
    ours: ClassVar = {OURS: "penjing.bench.penjing_trial alignment"}
    labels: ClassVar = {
        "units_per_second": ("{unit}/s", lambda value: f"{value:.1f}"),
        "seconds_per_step": ("step, s", lambda value: f"{value:.3f}"),
        "cpu_seconds_per_step": ("step, CPU s", lambda value: f"{value:.3f}"),
        "mean_sampling_seconds": ("of it sampling, s", lambda value: f"{value:.3f}"),
        "training_seconds": ("all steps, s", lambda value: f"{value:.1f}"),
        "process_seconds": ("whole process, s", lambda value: f"{value:.1f}"),
        "peak_bytes": ("peak memory, MiB", lambda value: f"{value / MEBIBYTE:.0f}"),
        "peak_bytes_beyond_imports": ("of it beyond imports, MiB", lambda value: f"{value / MEBIBYTE:.0f}"),
        "last_loss": ("loss, last step", lambda value: f"{value:.4f}"),
        "last_accuracy": ("pairs right, last step", lambda value: f"{value:.3f}"),
        "mean_reward": ("reward, mean", lambda value: f"{value:.3f}"),
        "mean_answer_tokens": ("answer tokens, mean", lambda value: f"{value:.1f}"),
    }

    def prepare(self, work: Path, request: BenchmarkRequest) -> Prepared:
        from penjing.bench.alignment_data import prepare

        return prepare(work, request, self.method)

    def trial_spec(self, spec: AlignmentSpec, name: str, options: Options) -> AlignmentSpec:
        return replace(spec, checkpointing=options.checkpointing and name not in self.ours)


class Dpo(_Alignment):
    method = "dpo"
    unit = "pairs"
    goals: ClassVar = {"trl": {"units_per_second": 2.0, "peak_bytes": 0.6}}

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        firsts = [trials[0]["figures"] for trials in rounds(record, "step").values()]
        if len(firsts) < 2:
            return []
        return [f"losses of the same step differ by {largest_loss_difference(firsts[0], firsts[1]):.1e} at most"]


class Grpo(_Alignment):
    method = "grpo"
    unit = "prompts"
    goals: ClassVar = {"trl": {"units_per_second": 5.0}}


def largest_loss_difference(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Of the losses of the same step."""
    return max(abs(one["loss"] - other["loss"]) for one, other in zip(ours, theirs, strict=True))
