"""Time training steps over batch, length and precision: `python benchmarks/sweep.py --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from compare.options import numbers
from compare.run import main
from steps.sweep import Grid
from steps.sweep_report import run_sweep

from penjing.base import config
from penjing.commands.arguments import Settings, console, resolved


def sweep(
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

    python benchmarks/sweep.py pretrain model=tiny --rows 2,4,8 --accumulation 1,2 --lengths 128,256 --out sweep
    """
    grid = Grid(
        micro_size=numbers(rows, "--rows"),
        accumulate=numbers(accumulation, "--accumulation"),
        seq_len=numbers(lengths, "--lengths"),
        dtypes=config.convert(tuple[str, ...], dtypes, "--dtypes"),
        recompute=config.convert(tuple[str, ...], recompute, "--recompute"),
    )
    run_sweep(resolved(recipe, settings), grid, console, steps=steps, seconds=seconds, out=out)


if __name__ == "__main__":
    main(sweep)
