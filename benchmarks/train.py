"""Train the same model with penjing and with other trainers: `python benchmarks/train.py --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from compare.options import Baseline, Out, Resume, Threads, Trials
from compare.run import compare, main

from penjing.base.errors import UserError
from penjing.commands.arguments import Settings


def train(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="dpo, grpo: the initial model, as in `penjing generate`."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Documents to pretrain on (none: Python's library); pairs for dpo; prompts for grpo."),
    ] = None,
    method: Annotated[str, typer.Option(help="pretrain, dpo or grpo; default: pretrain, with RUN dpo.")] = "",
    baseline: Baseline = "all",
    quick: Annotated[bool, typer.Option("--quick", help="pretrain: a small model, one trial each, minutes.")] = False,
    trials: Trials = 0,
    seconds: Annotated[float, typer.Option(help="pretrain: training time; 0 = 600, with --quick 30.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a trial; the first two are not counted.")] = 12,
    threads: Threads = 0,
    baseline_checkpointing: Annotated[
        bool, typer.Option(help="dpo, grpo: TRL recomputes activations to save memory, its default.")
    ] = True,
    search_rates: Annotated[
        bool,
        typer.Option("--search-rates", help="pretrain: first search every trainer's learning rate, by one method."),
    ] = False,
    out: Out = None,
    resume: Resume = False,
    settings: Settings = None,
) -> None:
    """Train the same model on the same data with penjing and with other trainers, and compare speed and memory.

    Pretraining runs on the GPU if there is one (compute.device=cpu: not), DPO and GRPO on the CPU.

    [bold]Examples[/]

    python benchmarks/train.py --quick

    python benchmarks/train.py --baseline trainer --seconds 600 --data corpus.jsonl --out results/bench.json

    python benchmarks/train.py --trials 3 --out results/bench.json --resume

    python benchmarks/train.py runs/quickstart --data runs/quickstart/data/dpo.jsonl

    python benchmarks/train.py runs/quickstart --method grpo --data runs/quickstart/data/rl.jsonl --threads 1
    """
    if method == "decode":
        raise UserError("is a script of its own", where="--method", got=method, wanted="python benchmarks/decode.py")
    compare(
        out,
        resume,
        method=method,
        run=run,
        data=data,
        baseline=baseline,
        quick=quick,
        settings=tuple(settings or ()),
        trials=trials or (1 if quick else 3),
        seconds=seconds or (30.0 if quick else 600.0),
        steps=steps,
        threads=threads,
        checkpointing=baseline_checkpointing,
        search=search_rates,
    )


if __name__ == "__main__":
    main(train)
