"""penjing bench: speed and memory, beside other programs and beside predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penjing.base import config
from penjing.base.errors import UserError
from penjing.commands.arguments import Settings, console, resolved, say

app = typer.Typer(no_args_is_help=True, help="Benchmark speed and memory on this machine, beside other programs.")


@app.command("train")
def bench_train(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="dpo, grpo: the model to begin with, as of `penjing generate`."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Documents to pretrain on (none: Python's library); pairs for dpo; prompts for grpo."),
    ] = None,
    method: Annotated[str, typer.Option(help="pretrain, dpo or grpo; by itself pretrain, with RUN dpo.")] = "",
    peer: Annotated[str, typer.Option(help="A peer's name, several with commas, all, or none.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="pretrain: a small model, one trial each, minutes.")] = False,
    trials: Annotated[int, typer.Option(help="Processes of each, in turn; 0 = 3, with --quick 1.", min=0)] = 0,
    seconds: Annotated[float, typer.Option(help="pretrain: of training; 0 = 600, with --quick 30.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a trial; the first two are not counted.")] = 12,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = physical cores.", min=0)] = 0,
    peer_checkpointing: Annotated[
        bool, typer.Option(help="Whether the peer computes activations twice to save memory, as it does by itself.")
    ] = True,
    search_rates: Annotated[
        bool, typer.Option("--search-rates", help="pretrain: search everyone's learning rate in the same way first.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write; pretrain: after every trial anew.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="pretrain: go on with the trials in --out, or add to them.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Train the same model on the same data with ours and with other trainers, and compare speed and memory.

    Pretraining is compared on the GPU where there is one (compute.device=cpu: not), DPO and GRPO on the CPU.

    [bold]Examples[/]

    penjing bench train --quick

    penjing bench train --peer trainer --seconds 600 --data corpus.jsonl --out results/bench.json

    penjing bench train --trials 3 --out results/bench.json --resume

    penjing bench train runs/quickstart --data runs/quickstart/data/dpo.jsonl

    penjing bench train runs/quickstart --method grpo --data runs/quickstart/data/rl.jsonl --threads 1
    """
    from penjing.commands.bench import bench, keep, write

    if resume and out is None:
        raise UserError("with no file there is nothing to go on with", where="--resume", wanted="--out FILE")
    has_trials = False

    def save(part: dict[str, Any]) -> None:
        nonlocal has_trials
        has_trials = out is not None and keep(part, out, sys.argv[1:])

    try:
        result = bench(
            console,
            method=method,
            run=run,
            data=data,
            peer=peer,
            quick=quick,
            trials=trials or (1 if quick else 3),
            seconds=seconds or (30.0 if quick else 600.0),
            steps=steps,
            threads=threads,
            checkpointing=peer_checkpointing,
            settings=tuple(settings or ()),
            search=search_rates,
            save=save,
            earlier=out if resume else None,
        )
    except KeyboardInterrupt:
        if has_trials:
            say(f"{out}: the figures of trials that ended; `--resume` goes on with them")
        raise
    if out is not None:
        write(result, out, sys.argv[1:])
        say(f"{out}: every trial's figures")


@app.command("matmul")
def bench_matmul(
    sizes: Annotated[str, typer.Option(help="Sides of the squares; empty: 1024 to 16384 as time allows.")] = "",
    dtypes: Annotated[str, typer.Option(help="bfloat16, float16, tf32, float32; empty: what the device has.")] = "",
    seconds: Annotated[float, typer.Option(help="That it may take, about.", min=1)] = 60.0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """The classic test: TFLOPS of square matrix products, median and spread, and the share of the stated peak.

    [bold]Example[/]

    penjing bench matmul --seconds 20
    """
    from penjing.commands.sweep import run_matmul

    run_matmul(
        config.convert(tuple[int, ...], sizes, "--sizes") if sizes else (),
        tuple(name for name in dtypes.split(",") if name),
        seconds,
        out,
        console,
    )


@app.command("sweep")
def bench_sweep(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="Whose model and optimizer.")] = "pretrain",
    settings: Settings = None,
    rows: Annotated[str, typer.Option(help="Rows of a pass, such as 4,8,16.")] = "",
    passes: Annotated[str, typer.Option(help="Passes of a step (accumulation), such as 1,2,4.")] = "",
    lengths: Annotated[str, typer.Option(help="Row lengths, such as 256,512.")] = "",
    dtypes: Annotated[str, typer.Option(help="Such as bfloat16,float32.")] = "",
    recompute: Annotated[str, typer.Option(help="What is computed again going backward, such as none,block.")] = "",
    steps: Annotated[int, typer.Option(help="Steps timed at each point.", min=2)] = 8,
    seconds: Annotated[float, typer.Option(help="Of steps at each point, about.", min=0.1)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json, OUT.csv, OUT.md and OUT.svg.")] = None,
) -> None:
    """Train steps over batch, accumulation, length and precision: it/s, memory and use, measured beside predicted.

    What does not fit is a row of the table. No data are needed.

    [bold]Example[/]

    penjing bench sweep pretrain model=tiny --rows 2,4,8 --passes 1,2 --lengths 128,256 --out sweep
    """
    from penjing.bench.sweep import Grid
    from penjing.commands.sweep import run_sweep

    def numbers(text: str, where: str) -> tuple[int, ...]:
        found: tuple[int, ...] = config.convert(tuple[int, ...], text, where) if text else ()
        if any(number < 1 for number in found):
            raise UserError("not above zero", where=where, got=min(found))
        return found

    grid = Grid(
        micro_rows=numbers(rows, "--rows"),
        accumulate=numbers(passes, "--passes"),
        row_tokens=numbers(lengths, "--lengths"),
        dtypes=tuple(name for name in dtypes.split(",") if name),
        recompute=tuple(name for name in recompute.split(",") if name),
    )
    run_sweep(resolved(recipe, settings), grid, console, steps=steps, seconds=seconds, out=out)
