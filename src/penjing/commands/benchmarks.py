"""penjing bench: speed and memory of this machine, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penjing.base import config
from penjing.base.errors import UserError
from penjing.commands.arguments import Settings, console, resolved

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory of this machine. Comparisons with other programs: benchmarks/ of the source.",
)


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
    from penjing.workflows.sweep import run_matmul

    run_matmul(_numbers(sizes, "--sizes"), config.convert(tuple[str, ...], dtypes, "--dtypes"), seconds, out, console)


@app.command("sweep")
def bench_sweep(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="Sets model and optimizer.")] = "pretrain",
    settings: Settings = None,
    rows: Annotated[str, typer.Option(help="Rows of a micro-batch, such as 4,8,16.")] = "",
    accumulation: Annotated[str, typer.Option(help="Micro-batches of a step, such as 1,2,4.")] = "",
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

    penjing bench sweep pretrain model=tiny --rows 2,4,8 --accumulation 1,2 --lengths 128,256 --out sweep
    """
    from penjing.bench.sweep import Grid
    from penjing.workflows.sweep import run_sweep

    grid = Grid(
        micro_size=_numbers(rows, "--rows"),
        accumulate=_numbers(accumulation, "--accumulation"),
        seq_len=_numbers(lengths, "--lengths"),
        dtypes=config.convert(tuple[str, ...], dtypes, "--dtypes"),
        recompute=config.convert(tuple[str, ...], recompute, "--recompute"),
    )
    run_sweep(resolved(recipe, settings), grid, console, steps=steps, seconds=seconds, out=out)


@app.command("train", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@app.command("decode", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def moved(context: typer.Context) -> None:
    name = context.info_name
    raise UserError("moved", where=f"bench {name}", next_step=f"Run `python benchmarks/{name}.py` of penjing's source.")


def _numbers(text: str, where: str) -> tuple[int, ...]:
    numbers: tuple[int, ...] = config.convert(tuple[int, ...], text, where)
    if any(number < 1 for number in numbers):
        raise UserError("not above zero", where=where, got=min(numbers))
    return numbers
