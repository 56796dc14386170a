"""penjing show and penjing doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penjing.base import config
from penjing.commands.arguments import Settings, console


def show(
    what: Annotated[str, typer.Argument(help="A recipe, a run's folder, `models` or `recipes`.")],
    settings: Settings = None,
) -> None:
    """Print a recipe with every setting resolved, the known model shapes, or a run's results.

    [bold]Examples[/]

    penjing show pretrain model=64m

    penjing show models

    penjing show runs/quickstart
    """
    from penjing.commands import show as inspect

    inspect.show(what, config.parse_overrides(settings or []), console)


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's or quickstart's folder, to check instead.")
    ] = None,
) -> None:
    """Check this machine: devices, matmul speed, and missing packages.

    With RUN: check every byte that a resumed run would read, and say where it resumes. Changes nothing.

    [bold]Examples[/]

    penjing doctor

    penjing doctor runs/quickstart
    """
    if run is not None:
        from penjing.commands.check_run import check_runs

        raise typer.Exit(0 if check_runs(run, console) else 1)
    from penjing.commands.show import check_machine

    check_machine(console)
