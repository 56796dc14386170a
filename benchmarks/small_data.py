"""Many short trainings on little text: which size, settings and length give the fewest held-out bits per byte.

Run: python benchmarks/small_data.py CELLS.jsonl --text bronte=bronte.txt:2500000 --work runs/small_data --jobs 2
Table: python benchmarks/small_data.py --work runs/small_data --table --out results/small_data.json

A cell is one line of CELLS: {"name", "corpus", "size", "seed", "steps", "settings": {"a.b": value}}. It is trained as
`penjing quickstart` trains (the recipe `tiny`, the end of the text held out), by one thread, and validated ten times on
all of the held-out text. With "curve": true the rate stays constant, and a mean of the weights over about the last
seventh of the steps is validated after 1/16, 1/8 ... of them: one training then stands for every shorter one too.

Cells in WORK/cells.jsonl are not trained again; several such programs may share WORK. `cpu_seconds` is the processor
time of the steps alone, which other work on the machine changes little. `--speed` times a few steps of each cell with
all cores, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compare.table import ResultTable, spread, with_range

COLUMNS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")
SIZES = {
    "0.5M": (2048, 96, 3, 1, 96, 256),
    "1M": (2048, 128, 4, 1, 128, 352),  # the preset `tiny`
    "2M": (2048, 192, 4, 2, 96, 512),
    "3.5M": (2048, 256, 4, 2, 128, 704),
    "7M": (2048, 320, 6, 3, 128, 896),
    "14M": (4096, 448, 6, 4, 128, 1216),
}
VALIDATIONS = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="?", help="file of cells, read again after each one")
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE, or NAME=FILE:BYTES for its beginning")
    parser.add_argument("--work", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--device", default="cpu", help="as compute.device (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (default: %(default)s)")
    parser.add_argument("--speed", type=int, default=0, help="instead: time so many steps with all cores")
    parser.add_argument("--table", action="store_true", help="instead: show the finished cells")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the table's cells")
    return parser.parse_args()


def shape(size: str) -> dict[str, Any]:
    return {"preset": "tiny", **dict(zip(COLUMNS, SIZES[size], strict=True)), "num_key_value_heads": SIZES[size][3]}


def key(cell: dict[str, Any]) -> str:
    names = ("corpus", "size", "seed", "steps", "settings", "curve")
    return json.dumps({name: cell.get(name) for name in names}, sort_keys=True)


@contextmanager
def locked(work: Path) -> Iterator[None]:
    with (work / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.is_file() else []


def take(cells: Path, work: Path) -> dict[str, Any] | None:
    """The first cell that no program has taken or finished."""
    with locked(work):
        taken = {key(row) for row in rows(work / "cells.jsonl")}
        taken |= {key(row) for row in rows(work / "taken.jsonl") if Path(f"/proc/{row['pid']}").exists()}
        for cell in rows(cells):
            if key(cell) not in taken:
                with (work / "taken.jsonl").open("a") as file:
                    file.write(json.dumps({**cell, "pid": os.getpid()}) + "\n")
                return cell
    return None


def make_texts(asked: argparse.Namespace) -> None:
    for item in asked.text:
        name, _, source = item.partition("=")
        path, _, num_bytes = source.partition(":")
        target = asked.work / f"{name}.txt"
        if not target.exists():
            raw = Path(path).read_bytes()[: int(num_bytes) if num_bytes else None]
            target.write_text(raw.decode("utf-8", errors="ignore"), encoding="utf-8")


def prepare(cell: dict[str, Any], work: Path, folder: Path, threads: int, device: str) -> Any:
    from penjing.base.config import parse_overrides
    from penjing.parallel.base import make_strategy
    from penjing.train.build import prepare_run
    from penjing.train.load_model import set_threads
    from penjing.workflows.train import resolve_run

    set_threads(threads, 1)
    settings = {
        "out": str(folder),
        "max_steps": cell["steps"],
        "seed": cell["seed"],
        "model": shape(cell["size"]) if cell.get("size") else {},
        "data": {"train": [str(work / f"{cell['corpus']}.txt")], "clean": ["default"], "val_fraction": 0.05},
        "compute": {"device": device, "threads": threads},
        "eval": {"every": max(1, cell["steps"] // VALIDATIONS), "sequences": 4096},
        "sample": {"every": 0},
        "checkpoint": {"every": 10**9},
        "log": {"every": max(1, cell["steps"] // VALIDATIONS)},
    }
    if cell.get("curve"):
        settings["schedule"] = {"name": "constant", "warmup_ratio": 0.01}
        settings["eval"]["every"] = max(1, cell["steps"] // 16)
    overrides = parse_overrides([f"{name}={value}" for name, value in cell.get("settings", {}).items()])
    return prepare_run(resolve_run("tiny", settings, overrides), make_strategy(device))


class WeightMean:
    """A running mean of the weights, as one of a run's optimizers. The weight of step t is proportional to t^6
    (arXiv:2312.02696, section 3), so at any step it is a mean of about the last seventh."""

    def __init__(self, model: Any) -> None:
        self.parameters, self.steps = list(model.parameters()), 0
        self.means = [parameter.detach().clone() for parameter in self.parameters]
        self.param_groups: list[dict[str, Any]] = []

    def step(self) -> None:
        self.steps += 1
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter.detach(), 1 - (1 - 1 / self.steps) ** 7)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def swap(self) -> None:
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            kept = parameter.detach().clone()
            parameter.data.copy_(mean)
            mean.copy_(kept)

    def validate(self, measure: Any, due: set[int], began: float, seconds: dict[int, float]) -> dict[str, float]:
        """Figures of the mean weights after one of the steps `due`; and the processor time of training until then."""
        if self.steps not in due:
            return {}
        start = time.process_time()
        seconds[self.steps] = round(start - began - sum(seconds.get(-step, 0.0) for step in due), 1)
        self.swap()
        figures = measure()
        self.swap()
        seconds[-self.steps] = time.process_time() - start  # of the validation
        return dict(figures)


def train_cell(cell: dict[str, Any], work: Path, device: str) -> dict[str, Any]:
    """The cell with its figures: bits per byte of each validation, by step."""
    from penjing.base.files import sha256_text
    from penjing.plan.flops import parameters
    from penjing.train.loop import train

    folder = work / "runs" / sha256_text(key(cell))[:12]
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    made = prepare(cell, work, folder, 1, device)
    cpu, context, seconds = time.process_time(), made.context, dict[int, float]()
    if cell.get("curve"):
        mean, due = WeightMean(made.model), {cell["steps"] // 2**halved for halved in range(5)}
        context = dataclasses.replace(
            context,
            optimizers=[*context.optimizers, mean],
            validate=lambda: mean.validate(made.context.validate, due, cpu, seconds),
        )
    final = train(context, made.state)
    cpu = time.process_time() - cpu
    made.context.trackers.end()
    made.context.source.close()
    curve = {row["step"]: round(row["val_bits_per_byte"], 5) for row in _validations(folder)}
    run, totals = made.run, made.context.meter.totals()
    shutil.rmtree(folder, ignore_errors=True)
    return {
        **cell,
        "parameters": parameters(run.model).total,
        "tokens": totals["tokens"],
        "epochs": round(cell["steps"] * run.batch.size / made.size.units_per_epoch, 3),
        "end": final["val_bits_per_byte"],
        "best": min(curve.values(), default=final["val_bits_per_byte"]),
        "bits_per_byte": curve,
        "seconds_by_step": {step: value for step, value in seconds.items() if step > 0},
        "cpu_seconds": cpu * totals["training_seconds"] / (totals["training_seconds"] + totals["validation_seconds"]),
        "wall_seconds": time.perf_counter() - began,
    }


def _validations(folder: Path) -> Iterator[dict[str, Any]]:
    return (row for row in rows(folder / "metrics.jsonl") if "val_bits_per_byte" in row)


def work_off(cells: Path, work: Path, device: str) -> None:
    while (cell := take(cells, work)) is not None:
        try:
            row = train_cell(cell, work, device)
        except Exception as error:
            row = {**cell, "error": f"{type(error).__name__}: {error}"[:300]}
        with locked(work), (work / "cells.jsonl").open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        shown = {name: row.get(name) for name in ("name", "corpus", "size", "seed", "epochs", "best", "end", "error")}
        print(json.dumps(shown, ensure_ascii=False), flush=True)


def speed(asked: argparse.Namespace) -> None:
    """Seconds of a step with all cores, for the cells of the file."""
    for cell in rows(asked.cells):
        folder, threads = asked.work / "speed", os.cpu_count() or 1
        made = prepare({**cell, "steps": asked.speed}, asked.work, folder, threads, asked.device)
        step = made.estimate.step_seconds if hasattr(made.estimate, "step_seconds") else made.context.meter.expected
        made.context.trackers.end()
        made.context.source.close()
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({**cell, "estimate": str(step)}), flush=True)


def table(cells: list[dict[str, Any]]) -> ResultTable:
    """One line per corpus, size, settings and length: medians over the seeds, ranges behind them."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        if "error" not in cell:
            groups.setdefault((cell["corpus"], cell["size"], cell["name"], cell["steps"]), []).append(cell)
    lines = []
    for (corpus, size, name, steps), group in groups.items():
        bits = [with_range(spread([cell[which] for cell in group]), "{:.4f}".format) for which in ("best", "end")]
        seconds = statistics.median(cell["cpu_seconds"] for cell in group)
        tokens = f"{group[0]['tokens'] / 1e6:.2f}M"
        epochs, seeds = f"{group[0]['epochs']:.1f}", str(len(group))
        lines.append([f"{corpus}, {size}, {name}", str(steps), tokens, epochs, seeds, *bits, f"{seconds:.0f}"])
    headings = ["text, size, settings", "steps", "tokens", "epochs", "seeds", "best", "end", "CPU s"]
    return ResultTable(headings, sorted(lines))


def main() -> None:
    asked = parse()
    asked.work.mkdir(parents=True, exist_ok=True)
    make_texts(asked)
    if asked.table:
        from penjing.base.files import write_json

        cells = rows(asked.work / "cells.jsonl")
        print(table(cells).markdown())
        if asked.out:
            write_json(asked.out, {"cells": cells})
    elif asked.speed:
        speed(asked)
    else:
        os.nice(5)
        with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            for job in [pool.submit(work_off, asked.cells, asked.work, asked.device) for _ in range(asked.jobs)]:
                job.result()


if __name__ == "__main__":
    main()
