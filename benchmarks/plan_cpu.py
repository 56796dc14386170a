"""Ten different small runs planned at L2 and then run, each in a process of its own: how good are the plans here?

Run: python benchmarks/plan_cpu.py --threads 1       (all ten, about 9 minutes on two quiet cores)
     python benchmarks/plan_cpu.py                   (on all cores, as `penjing train` chooses)
     python benchmarks/plan_cpu.py --render          (only the table of docs/cost.md, from the newest records)
     python benchmarks/plan_cpu.py --only 2 --steps-share 0.1      (a quick look)

Each run is `penjing train` as a user types it. Its plan.json is written before step 1 and read afterwards, beside
outcome.json; nothing else is measured here. Wall time is the meter's: training, validation, checkpoints, samples.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from compare.table import ResultTable

from penjing.base.files import read_json, write_json
from penjing.plan.prediction_history import compare

ROOT = Path(__file__).parents[1]
TINY = ["data.seq_len=256", "eval.sequences=64"]
WIDE = ["model.hidden_size=256", "model.intermediate_size=704"]
RL = ["objective.rollout.max_new_tokens=24", "objective.rollout.num_generations=4", "data.seq_len=256"]
# Name, recipe, data, settings, steps. `{base}` is the first run, which later ones start from.
RUNS: list[tuple[str, str, str, list[str], int]] = [
    ("tiny", "tiny", "pretrain", [*TINY], 700),
    ("tiny-adamw", "pretrain", "pretrain", ["model=tiny", "optimizer=adamw", *TINY, "batch.size=8"], 300),
    ("wide", "pretrain", "pretrain", ["model=tiny", *WIDE, *TINY, "batch.size=8"], 150),
    ("deep", "tiny", "pretrain", ["model.num_hidden_layers=8", *TINY], 400),
    ("short-rows", "tiny", "pretrain", ["data.seq_len=64", "batch.size=16"], 700),
    ("long-rows", "tiny", "pretrain", ["data.seq_len=1024", "batch.size=2"], 250),
    ("accumulated", "tiny", "pretrain", [*TINY, "batch.size=32", "batch.micro_size=4"], 120),
    ("mixture", "tiny", "pretrain", ["model=tiny-moe", *TINY], 300),
    ("sft", "tiny_sft", "sft", ["init_from={base}", *TINY], 500),
    ("grpo", "grpo", "rl", ["init_from={sft}", *RL, "batch.size=8", "eval.sequences=32"], 60),
]


def train(recipe: str, settings: list[str], out: Path, home: Path, threads: int) -> float:
    """Run `penjing train`; returns the seconds of the whole process. threads: 0 = as many as there are cores."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "penjing", "train", recipe, f"out={out}", "compute.device=cpu"]
    command += [f"compute.threads={threads}", *settings]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PENJING_HOME": str(home)})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - start


def summary(values: list[float]) -> dict[str, float]:
    sizes = [abs(value) for value in values]
    return {
        "median": statistics.median(sizes),
        "ninetieth_percentile": float(np.quantile(sizes, 0.9)),
        "largest": max(sizes),
        "runs": len(sizes),
    }


BEGIN, END = "<!-- ten runs: rendered by benchmarks/plan_cpu.py -->", "<!-- end of ten runs -->"
PAGE = ROOT / "docs" / "cost.md"


def records() -> list[dict[str, Any]]:
    """The newest record for each number of threads."""
    found = {record["threads"]: record for record in map(read_json, sorted((ROOT / "results").glob("plan_cpu_*.json")))}
    return [found[threads] for threads in sorted(found)]


def table(records: list[dict[str, Any]]) -> str:
    """All ten runs in Markdown, two columns for each number of threads; then the errors in the middle and at worst."""
    heads = [f"{what}, {_threads(record)}" for record in records for what in ("time", "peak memory")]
    lines = []
    for rows in zip(*(record["runs"] for record in records), strict=True):
        cells = [_off(row["plan"], row["outcome"], *names) for row in rows for names in (SECONDS, BYTES)]
        lines.append([rows[0]["name"], *cells])
    for name, figure in (("median of the errors", "median"), ("90th percentile", "ninetieth_percentile")):
        lines.append([name, *[f"{record[of][figure]:.1%}" for record in records for of in ("time", "peak_memory")]])
    held = [f"{_threads(record)} {record['inside_interval']} of {len(record['runs'])}" for record in records]
    made = [f"{_threads(one)} on {one['date']}, {one['steps_share']:g} of the steps" for one in records]
    return "\n".join([
        ResultTable(["run", *heads], lines).markdown(),
        f"Time that came inside its interval: {', '.join(held)}. Made with {', '.join(made)}.",
    ])  # fmt: skip


SECONDS, BYTES = ("predicted_seconds", "seconds", "s"), ("predicted_peak_memory_bytes", "peak_memory_bytes", "MiB")


def _threads(record: dict[str, Any]) -> str:
    return f"{record['threads']} thread{'s' if record['threads'] > 1 else ''}"


def _off(plan: dict[str, Any], outcome: dict[str, Any], planned: str, came: str, unit: str) -> str:
    one, other = plan[planned], outcome[came]
    shown = f"{one:.1f} -> {other:.1f} s" if unit == "s" else f"{one / 2**20:.0f} -> {other / 2**20:.0f} MiB"
    return f"{shown}, {(one - other) / other:+.1%}"


def render(page: str, records: list[dict[str, Any]]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(records)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, default=len(RUNS), help="the first so many")
    parser.add_argument("--steps-share", type=float, default=1.0, help="of each run's steps")
    parser.add_argument("--threads", type=int, default=0, help="of each run; 0 = one for each core")
    parser.add_argument("--out", type=Path, default=None, help="default: results/plan_cpu_N-threads_DATE.json")
    parser.add_argument("--render", action="store_true", help="only the page, from the newest records")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the runs; default: a temporary one")
    asked = parser.parse_args()
    if asked.only < len(RUNS) and not asked.out and not asked.render:
        parser.error("--only makes no official record: give --out FILE")
    if asked.render:
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), records()), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = asked.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        data = work / "data"
        if not data.is_dir():
            toy = [sys.executable, "-m", "penjing", "data", "toyworld", "--out", str(data), "--documents", "20000"]
            subprocess.run([*toy, "--conversations", "8000", "--prompts", "1000"], check=True, capture_output=True)
        rows = []
        for name, recipe, kind, settings, steps in RUNS[: asked.only]:
            out = work / name
            count = max(12, round(steps * asked.steps_share))
            every = max(1, count // 2)
            given = [word.format(base=work / "tiny", sft=work / "sft") for word in settings]
            words = [f"data.train={data / kind}.jsonl", f"max_steps={count}", f"eval.every={every}"]
            words += [f"checkpoint.every={every}", "sample.every=0"]
            process_seconds = train(recipe, [*words, *given], out, work / "home", asked.threads)
            plan, outcome = read_json(out / "plan.json"), read_json(out / "outcome.json")
            row = {
                "name": name,
                "steps": count,
                "settings": settings,
                "process_seconds": process_seconds,
                "errors": {term.name.strip(): term.error for term in compare(plan, outcome)},
                "inside_interval": plan["predicted_seconds_low"]
                <= outcome["seconds"]
                <= plan["predicted_seconds_high"],
                "plan": plan,
                "outcome": outcome,
            }
            rows.append(row)
            shown = ", ".join(f"{key} {value:+.1%}" for key, value in row["errors"].items() if value is not None)
            print(f"{name}: {outcome['seconds']:.1f} s, {shown}", flush=True)
    times = [row["errors"]["time"] for row in rows]
    peaks = [row["errors"]["peak memory"] for row in rows]
    result = {
        "what": "small CPU runs planned at L2, then run; errors are (planned - came) / came",
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "threads": asked.threads or os.cpu_count(),
        "steps_share": asked.steps_share,
        "time": summary(times),
        "peak_memory": summary(peaks),
        "inside_interval": sum(row["inside_interval"] for row in rows),
        "runs": rows,
    }
    path = asked.out or ROOT / "results" / f"plan_cpu_{result['threads']}-threads_{result['date']}.json"
    write_json(path, result)
    print(f"time: {result['time']}\npeak memory: {result['peak_memory']}\n{path}")


if __name__ == "__main__":
    main()
