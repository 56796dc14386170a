"""penjing report: an HTML page about one run, or a comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penjing.commands.arguments import say


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or quickstarts, finished or not.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; else report.html in the one RUN, or here for several.")
    ] = None,
) -> None:
    """Draw a run, or compare several, on one HTML page: curves, settings, predicted and actual, answers, samples.

    The page is one file that needs no network.

    [bold]Examples[/]
    penjing report runs/quickstart
    penjing report runs/dpo runs/dpo-ipo runs/dpo-lora --out dpo.html
    """
    from penjing.workflows.report import write_page

    _, page = write_page(runs, out)
    say(f"report: {page}")
