"""The speed of a training on one rank and on several, by strategy: `python benchmarks/scale.py --help`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from compare.options import numbers
from compare.run import main
from rich.console import Console

from penjing import devices
from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import write_json
from penjing.base.markup import escape_markup, print_table
from penjing.commands.arguments import Recipe, Settings, console, resolved
from penjing.devices.choose import local_device
from penjing.parallel import STRATEGIES
from penjing.plan.hardware import environment
from penjing.track.run_record import RunRecord

WARM_STEPS = 2  # not counted: allocations, caches
# Each rank of a CPU stays on a core of its own; what one rank is compared with has one core too.
PIN = """
import os
if hasattr(os, "sched_setaffinity"):  # not on macOS
    rank, cores = int(os.environ.get("LOCAL_RANK", "0")), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
"""
MAIN = """
import sys
from penjing.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """What is measured. strong: the same batch on all ranks; else each rank has the same share of a larger one."""

    ranks: tuple[int, ...] = (2,)  # each compared with one
    strategies: tuple[str, ...] = ("ddp",)
    weak: bool = False
    batch_size: int = 32  # of one rank
    steps: int = 6
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in self.strategies:
            if name not in STRATEGIES:
                raise UserError("no such strategy", where="--strategies", got=name, wanted=", ".join(STRATEGIES))


def measure_scaling(
    recipe: str, settings: Sequence[str], options: ScaleOptions, out: Path | None, console: Console
) -> None:
    """Measure in rounds, print a table and write the record. Raises UserError if a training fails."""
    device = local_device("auto")
    counts = tuple(count for count in sorted(set(options.ranks)) if count > 1)
    cases = [("single", 1), *((name, count) for name in options.strategies for count in counts)]
    rates: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        data = _data(Path(folder), settings)
        for number in range(options.rounds):
            for case in cases if number % 2 == 0 else cases[::-1]:
                run_folder = Path(folder) / f"{number}-{case[0]}-{case[1]}"
                size = options.batch_size * (case[1] if options.weak else 1)
                words = [recipe, *data, *settings, f"batch.size={size}", f"max_steps={options.steps}"]
                rates[case].append(_tokens_per_second(words, *case, run_folder))
                console.print(f"  round {number + 1}: {case[0]} x {case[1]}, {rates[case][-1]:,.0f} tokens/s")
    rows = [_row(*case, rates[case], rates["single", 1]) for case in cases]
    cells = []
    for row in rows:
        rate = f"{statistics.median(row['tokens_per_second']):,.0f}"
        gain = (f"{row['speedup']:.2f} x", f"{row['efficiency']:.0%}")
        cells.append((f"  {row['strategy']}", row["ranks"], rate, *gain))
    how = "weak: each rank has the same batch" if options.weak else "strong: the same batch in all"
    print_table(console, ("  strategy", "ranks>", "tokens/s>", "speed-up>", "efficiency>"), cells, title=how)
    if out is not None:
        record = {"recipe": recipe, "settings": list(settings), **asdict(options), "rows": rows}
        write_json(out, {**environment(device, torch.float32), **record})
        console.print(escape_markup("written", str(out)))


def _row(strategy: str, ranks: int, rates: list[float], alone: list[float]) -> dict[str, Any]:
    """Tokens per second of each round, and the median speed-up against one rank in the same round."""
    speedup = statistics.median(rate / one for rate, one in zip(rates, alone, strict=True))
    row = {"strategy": strategy, "ranks": ranks, "tokens_per_second": rates}
    return {**row, "speedup": speedup, "efficiency": speedup / ranks}


def _data(folder: Path, settings: Sequence[str]) -> list[str]:
    """Texts of the toy world, if the settings name none."""
    if any(word.startswith("data.train=") for word in settings):
        return []
    from penjing.data import synthetic

    counts = {"conversations": 1, "preferences": 1, "prompts": 1, "questions_per_kind": 1}
    synthetic.write(folder / "data", seed=1, documents=4000, **counts)
    return [f"data.train={folder / 'data' / 'pretrain.jsonl'}"]


def _tokens_per_second(words: list[str], strategy: str, ranks: int, folder: Path) -> float:
    """Train in processes of its own; the rate of the median step, from one logged step to the next."""
    quiet = ["log.every=1", "eval.every=0", "sample.every=0", "checkpoint.every=1000000"]
    script = folder.with_suffix(".py")
    script.write_text((PIN if devices.of(local_device("auto")).is_host else "") + MAIN)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), "train", *words, *quiet]
    command += [f"parallel.strategy={strategy}", f"out={folder}"]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **threads})
    if done.returncode:
        got = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise UserError("a training failed", where=f"{strategy}, {ranks} ranks", got=got)
    lines = [line.raw for line in RunRecord(folder).metrics if "tokens_per_second" in line.raw]
    counted = lines[WARM_STEPS:]
    if len(counted) < 2:
        raise UserError("too few steps to time", where="--steps", wanted=f"at least {WARM_STEPS + 2}")
    rates = [(b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"]) for a, b in pairwise(counted)]
    return float(statistics.median(rates))


def scale(
    recipe: Recipe,
    settings: Settings = None,
    ranks: Annotated[str, typer.Option(help="Numbers of processes, each compared with one.")] = "2",
    strategies: Annotated[str, typer.Option(help="Strategies to compare, as parallel.strategy.")] = "ddp",
    weak: Annotated[bool, typer.Option("--weak", help="Weak scaling: each rank has the batch of one alone.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each training; the first two do not count.", min=4)] = 6,
    rounds: Annotated[int, typer.Option(help="Trainings of each; the median speed-up counts.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Tokens per second of a training on one device and on several, in turn: the speed-up of each strategy.

    On a CPU each process stays on a core of its own.

    [bold]Example[/]

    python benchmarks/scale.py pretrain model=26m batch.size=8 batch.micro_size=2 --strategies ddp,fsdp2
    """
    options = ScaleOptions(
        ranks=numbers(ranks, "--ranks"),
        strategies=config.convert(tuple[str, ...], strategies, "--strategies"),
        weak=weak,
        batch_size=resolved(recipe, settings).batch.size,
        steps=steps,
        rounds=rounds,
    )
    measure_scaling(recipe, settings or [], options, out, console)


if __name__ == "__main__":
    main(scale)
