"""penjing bench: speed and memory, compared with other programs and with predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penjing.base import config
from penjing.base.errors import UserError
from penjing.commands.arguments import Settings, console, resolved, say

Baseline = Annotated[str, typer.Option(help="Another program; several with commas; all, or none.")]
Trials = Annotated[int, typer.Option(help="Processes of each program; 0 = 3, with --quick 1.", min=0)]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 = physical cores.", min=0)]
Out = Annotated[Path | None, typer.Option(help="JSON file, written after each trial.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the trials in --out, or add to them.")]

app = typer.Typer(no_args_is_help=True, help="Benchmark speed and memory on this machine against other programs.")


@app.command("train")
def bench_train(
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

    penjing bench train --quick

    penjing bench train --baseline trainer --seconds 600 --data corpus.jsonl --out results/bench.json

    penjing bench train --trials 3 --out results/bench.json --resume

    penjing bench train runs/quickstart --data runs/quickstart/data/dpo.jsonl

    penjing bench train runs/quickstart --method grpo --data runs/quickstart/data/rl.jsonl --threads 1
    """
    if method == "decode":
        raise UserError("is a separate command", where="--method", got=method, wanted="penjing bench decode")
    _compare(
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


@app.command("decode")
def bench_decode(
    baseline: Baseline = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tokens, one trial each.")] = False,
    trials: Trials = 0,
    threads: Threads = 0,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Generate with the same model in penjing and in other engines: time to first token, tokens/s by batch, memory.

    Two models with random weights, of 26M and 1M parameters, on the CPU; penjing also through its own server.

    [bold]Examples[/]

    penjing bench decode --quick

    penjing bench decode --baseline llama.cpp-f16,llama.cpp-q8_0 --out results/decode.json
    """
    _compare(
        out,
        resume,
        method="decode",
        baseline=baseline,
        quick=quick,
        trials=trials or (1 if quick else 3),
        threads=threads,
    )


def _compare(out: Path | None, resume: bool, **options: Any) -> None:
    """Run a comparison and write its record after each trial. options: see `commands.bench.bench`."""
    from penjing.bench.record import write
    from penjing.commands import bench

    if resume and out is None:
        raise UserError("there is no file to continue from", where="--resume", wanted="--out FILE")
    command, has_trials = ["penjing", *sys.argv[1:]], False

    def save(record: dict[str, Any]) -> None:
        nonlocal has_trials
        has_trials = out is not None and bench.save_record(record, out, command)

    try:
        record = bench.bench(console, save=save, earlier=out if resume else None, **options)
    except KeyboardInterrupt:
        if has_trials:
            say(f"{out}: the finished trials; `--resume` continues")
        raise
    if out is not None:
        write(record, out, command)
        say(f"{out}: every trial's figures")


@app.command("matmul")
def bench_matmul(
    sizes: Annotated[str, typer.Option(help="Matrix sizes; empty: 1024 to 16384 as time allows.")] = "",
    dtypes: Annotated[str, typer.Option(help="bfloat16, float16, tf32, float32; empty: all that the device has.")] = "",
    seconds: Annotated[float, typer.Option(help="Approximate time limit.", min=1)] = 60.0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """TFLOPS of square matmuls: median, spread, and the fraction of the stated peak.

    [bold]Example[/]

    penjing bench matmul --seconds 20
    """
    from penjing.commands.sweep import run_matmul

    run_matmul(_numbers(sizes, "--sizes"), config.convert(tuple[str, ...], dtypes, "--dtypes"), seconds, out, console)


@app.command("sweep")
def bench_sweep(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="Sets model and optimizer.")] = "pretrain",
    settings: Settings = None,
    rows: Annotated[str, typer.Option(help="Rows of a micro-batch, such as 4,8,16.")] = "",
    passes: Annotated[str, typer.Option(help="Micro-batches of a step (accumulation), such as 1,2,4.")] = "",
    lengths: Annotated[str, typer.Option(help="Row lengths, such as 256,512.")] = "",
    dtypes: Annotated[str, typer.Option(help="Such as bfloat16,float32.")] = "",
    recompute: Annotated[str, typer.Option(help="Activation checkpointing, such as none,block.")] = "",
    steps: Annotated[int, typer.Option(help="Steps timed at each point.", min=2)] = 8,
    seconds: Annotated[float, typer.Option(help="Approximate time per point.", min=0.1)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json, OUT.csv, OUT.md and OUT.svg.")] = None,
) -> None:
    """Sweep batch, accumulation, length and precision: speed and memory of training steps, measured and predicted.

    Points that do not fit get a row of the table too. No data are needed.

    [bold]Example[/]

    penjing bench sweep pretrain model=tiny --rows 2,4,8 --passes 1,2 --lengths 128,256 --out sweep
    """
    from penjing.bench.sweep import Grid
    from penjing.commands.sweep import run_sweep

    grid = Grid(
        micro_size=_numbers(rows, "--rows"),
        accumulate=_numbers(passes, "--passes"),
        seq_len=_numbers(lengths, "--lengths"),
        dtypes=config.convert(tuple[str, ...], dtypes, "--dtypes"),
        recompute=config.convert(tuple[str, ...], recompute, "--recompute"),
    )
    run_sweep(resolved(recipe, settings), grid, console, steps=steps, seconds=seconds, out=out)


def _numbers(text: str, where: str) -> tuple[int, ...]:
    numbers: tuple[int, ...] = config.convert(tuple[int, ...], text, where)
    if any(number < 1 for number in numbers):
        raise UserError("not above zero", where=where, got=min(numbers))
    return numbers
