"""penjing bench: speed and memory of this machine, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penjing.base import config
from penjing.base.errors import UserError
from penjing.commands.arguments import console

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
    from penjing.planner.profile import run_matmul

    run_matmul(numbers(sizes, "--sizes"), config.convert(tuple[str, ...], dtypes, "--dtypes"), seconds, out, console)


@app.command("sweep", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@app.command("train", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@app.command("decode", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def moved(context: typer.Context) -> None:
    name = context.info_name
    raise UserError("moved", where=f"bench {name}", next_step=f"Run `python benchmarks/{name}.py` of penjing's source.")


def numbers(text: str, where: str) -> tuple[int, ...]:
    numbers: tuple[int, ...] = config.convert(tuple[int, ...], text, where)
    if any(number < 1 for number in numbers):
        raise UserError("not above zero", where=where, got=min(numbers))
    return numbers
