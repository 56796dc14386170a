"""penjing watch."""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from penjing.commands.arguments import console


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of a quickstart.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="Time between two looks at the files.")] = 1.0,
) -> None:
    """Watch runs train: loss, speed, memory, time left beside the plan, newest samples and incidents.

    It reads the folders that other processes write, so it works over ssh, and ends when the runs do; Ctrl-C leaves it
    and stops no run. A run that is over, or a pipe as output: they are printed once.

    [bold]Examples[/]
    penjing watch runs/quickstart
    penjing watch runs/dpo runs/dpo-ipo
    """
    from penjing.workflows import watch as live

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the model's texts may hold what the terminal does not show
    live.watch(runs, console, seconds=seconds)
