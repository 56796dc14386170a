"""Ours and a peer in turn, one process a trial; what came of it as a table and as data."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from penjing.base.errors import UserError
from penjing.bench.meter import Spec, units_per_second
from penjing.bench.peers import NEEDS, PEERS

OURS = "penjing"
MEBIBYTE = 2**20
UNIT = {"dpo": "pairs", "grpo": "prompts"}
# What ours is to reach beside a peer: so many times its speed, at most this share of its memory.
GOALS: dict[str, dict[str, float]] = {
    "dpo": {"units_per_second": 2.0, "peak_bytes": 0.6},
    "grpo": {"units_per_second": 5.0},
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a comparison is made."""

    method: Literal["dpo", "grpo"]
    peer: str = "trl"  # trl or none
    trials: int = 3  # processes of each, alternating
    steps: int = 12  # of one trial, warm-up included
    warmup: int = 2  # steps that are not counted
    threads: int = 0  # of the CPU; 0 = physical cores
    # Peer: compute activations twice to save memory, its own default. With 1M parameters on one CPU core TRL's DPO took
    # 15.3 pairs/s and 1015 MiB with it, 16.9 pairs/s and 1262 MiB without.
    checkpointing: bool = True

    def __post_init__(self) -> None:
        if self.method not in PEERS:
            raise UserError("no such method", where="--method", got=self.method, wanted=" or ".join(PEERS))
        if self.peer not in ("none", *PEERS[self.method]):
            known = ["none", *PEERS[self.method]]
            raise UserError("no such peer", where="--peer", got=self.peer, wanted=" or ".join(known))
        if self.trials < 1 or self.threads < 0:
            raise UserError("too small", where="--trials, --threads", got=f"{self.trials}, {self.threads}")
        if not 0 <= self.warmup < self.steps:
            raise UserError("no step is left to count", where="--steps", got=self.steps, wanted=f"over {self.warmup}")


def is_installed(peer: str) -> bool:
    return peer != "none" and importlib.util.find_spec(NEEDS[peer]) is not None


def trial(module: str, spec: Any, folder: Path) -> dict[str, Any]:
    """Run one in a process of its own; what it printed, and the seconds it took from start to end.

    It is told by a file of `spec`, a dataclass with `out` and `threads` among its fields.

    Raises UserError with its last words if it failed.
    """
    folder.mkdir(parents=True)
    file = folder / "spec.json"
    file.write_text(json.dumps(asdict(replace(spec, out=str(folder / "run")))), encoding="utf-8")
    threads = {"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    # Nothing is compiled already when a trial begins, except that of the same number of the other kind.
    compiled = folder.parent / f"compiled-{folder.name.removeprefix('path-').removeprefix('step-')}"
    name, *more = module.split()  # a peer that runs in two ways is told which
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", name, str(file), *more],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **threads,
            **quiet,
            "TORCHINDUCTOR_CACHE_DIR": str(compiled),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
        },
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise UserError("a trial failed", where=module, got=last)
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "process_seconds": seconds}


def compare(
    asked: Asked, spec: Spec, folder: Path, console: Console, run_trial: Callable[..., dict[str, Any]] = trial
) -> dict[str, Any]:
    """All trials, alternating who goes first; prints the table and returns it as data."""
    modules = {OURS: "penjing.bench.ours"}
    if is_installed(asked.peer):
        modules[asked.peer] = PEERS[asked.method][asked.peer]
    elif asked.peer != "none":
        needed = NEEDS[asked.peer]
        console.print(
            f"  {needed} is not installed, so ours stands alone: pip install 'penjing[test]'",
            highlight=False,
            markup=False,
        )
    names = list(modules)
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(asked.trials):
        for name in names if number % 2 == 0 else names[::-1]:
            own = replace(spec, checkpointing=asked.checkpointing and name != OURS)
            one = run_trial(modules[name], own, folder / f"{name}-{number}")
            trials[name].append(one)
            rate = units_per_second(one, spec.batch, asked.warmup)
            unit, memory = UNIT[asked.method], one["peak_bytes"] / MEBIBYTE
            console.print(
                f"  trial {number + 1} {name}: {rate:.1f} {unit}/s, {memory:.0f} MiB, "
                f"{one['process_seconds']:.1f} s from start to end",
                highlight=False,
            )
    result = summary(asked, spec, trials)
    console.print(table(result))
    for line in verdicts(result):
        console.print(f"  {line}", highlight=False)
    return result


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def summary(asked: Asked, spec: Spec, trials: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Median and range of each figure over the trials, and ours over the peer's."""
    by_name: dict[str, Any] = {}
    for name, each in trials.items():
        rows = []
        for one in each:
            counted, cpu = one["step_seconds"][asked.warmup :], one["step_cpu_seconds"][asked.warmup :]
            row = {
                "units_per_second": units_per_second(one, spec.batch, asked.warmup),
                "seconds_per_step": sum(counted) / len(counted),
                "cpu_seconds_per_step": sum(cpu) / len(cpu),
                "training_seconds": sum(one["step_seconds"]),
                "process_seconds": one["process_seconds"],
                "peak_bytes": float(one["peak_bytes"]),
                "peak_bytes_beyond_imports": float(one["peak_bytes"] - one["peak_bytes_after_imports"]),
            }
            if "sampling_seconds" in one["figures"][0]:
                waited = [figures["sampling_seconds"] for figures in one["figures"][asked.warmup :]]
                row["sampling_seconds_per_step"] = sum(waited) / len(waited)
            if "answer_tokens" in one["figures"][0]:
                said = [figures["answer_tokens"] for figures in one["figures"]]
                row["mean_answer_tokens"] = sum(said) / len(said)
                row["mean_reward"] = sum(figures["reward"] for figures in one["figures"]) / len(said)
            for figure in ("loss", "accuracy"):
                if figure in one["figures"][-1]:
                    row[f"last_{figure}"] = one["figures"][-1][figure]
            rows.append(row)
        by_name[name] = {figure: spread([row[figure] for row in rows]) for figure in rows[0]}
        by_name[name]["options"] = each[0]["options"]
        by_name[name]["settings"] = each[0].get("settings", {})
    result: dict[str, Any] = {
        "method": asked.method,
        "unit": UNIT[asked.method],
        "asked": asdict(asked),
        "spec": {
            name: value
            for name, value in asdict(spec).items()
            if name not in ("model", "data", "run", "out", "stage", "match")
        },
        "versions": versions(),
        "medians": by_name,
        "trials": dict(trials),
    }
    if len(by_name) == 2:
        ours, theirs = by_name[OURS], next(value for name, value in by_name.items() if name != OURS)
        figures = (
            "units_per_second",
            "cpu_seconds_per_step",
            "training_seconds",
            "process_seconds",
            "peak_bytes",
            "peak_bytes_beyond_imports",
        )
        result["ours_over_peer"] = {name: ours[name]["median"] / theirs[name]["median"] for name in figures}
        result["goals"] = GOALS[asked.method]
        if "loss" in next(iter(trials.values()))[0]["figures"][0]:
            result["largest_loss_difference"] = _largest_difference(list(trials.values()))
    return result


def _largest_difference(trials: Sequence[list[dict[str, Any]]]) -> float:
    """Of the losses of the same step: how far the two drift apart."""
    first, second = ([float(figures["loss"]) for figures in each[0]["figures"]] for each in trials)
    return max(abs(one - other) for one, other in zip(first, second, strict=True))


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("penjing", "torch", "transformers", "trl", "accelerate", "litgpt"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "units_per_second": ("{unit}/s", lambda value: f"{value:.1f}"),
    "seconds_per_step": ("s a step", lambda value: f"{value:.3f}"),
    "cpu_seconds_per_step": ("CPU s a step", lambda value: f"{value:.3f}"),
    "sampling_seconds_per_step": ("of it sampling, s", lambda value: f"{value:.3f}"),
    "training_seconds": ("all steps, s", lambda value: f"{value:.1f}"),
    "process_seconds": ("whole process, s", lambda value: f"{value:.1f}"),
    "peak_bytes": ("peak memory, MiB", lambda value: f"{value / MEBIBYTE:.0f}"),
    "peak_bytes_beyond_imports": ("of it beyond imports", lambda value: f"{value / MEBIBYTE:.0f}"),
    "last_loss": ("loss, last step", lambda value: f"{value:.4f}"),
    "last_accuracy": ("pairs right, last step", lambda value: f"{value:.3f}"),
    "mean_reward": ("reward, mean", lambda value: f"{value:.3f}"),
    "mean_answer_tokens": ("answer tokens, mean", lambda value: f"{value:.1f}"),
}


def table(result: Mapping[str, Any]) -> Table:
    """A row a figure, a column a trainer: median, and the range over the trials."""
    made = Table(box=None, pad_edge=False, title=f"{result['method']}, median (range)", title_justify="left")
    made.add_column("")
    names = list(result["medians"])
    for heading in [*names, *(["ratio"] if len(names) == 2 else [])]:
        made.add_column(heading, justify="right")
    for figure, (label, show) in SHOWN.items():
        columns = [result["medians"][name].get(figure) for name in names]
        if None in columns:
            continue
        cells = [f"{show(one['median'])} ({show(one['low'])}-{show(one['high'])})" for one in columns]
        if len(names) == 2:
            ratio = result["ours_over_peer"].get(figure)
            cells.append(f"{ratio:.2f}" if ratio is not None else "")
        made.add_row(label.format(unit=result["unit"]), *cells)
    return made


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Which goals were reached, what both were told, and whether both learned the same."""
    lines = []
    for figure, wanted in result.get("goals", {}).items():
        got = result["ours_over_peer"][figure]
        faster = figure == "units_per_second"
        reached = got >= wanted if faster else got <= wanted
        words = f"at least {wanted:g} x the speed" if faster else f"at most {wanted:g} x the memory"
        lines.append(f"goal {words}: {got:.2f} x, {'reached' if reached else 'missed'}")
    if "largest_loss_difference" in result:
        lines.append(f"losses of the same step differ by {result['largest_loss_difference']:.1e} at most")
    lines += [f"{name}: {', '.join(each['options'])}" for name, each in result["medians"].items()]
    return lines
