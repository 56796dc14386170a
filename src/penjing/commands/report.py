"""penjing report: an HTML page about one run, or a comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penjing.base import config
from penjing.base.errors import UserError
from penjing.commands.arguments import say

if TYPE_CHECKING:
    from penjing.report.load_run import ReportData, ReportedRun

SIZE_PRESET = "ladder-"  # prefix of presets of the ladder; its recipe takes the size after a colon


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
    _, page = write_page(runs, out)
    say(f"report: {page}")


def write_page(folders: Sequence[Path], out: Path | None = None) -> tuple[ReportData, Path]:
    """Write the page; returns what was read and the page's path. Raises UserError for a folder that is no run."""
    from penjing.report.html import FILE_NAME, write_report
    from penjing.report.load_run import read_record

    record = read_record(folders)
    record = replace(record, runs=tuple(replace(run, defaults=recipe_defaults(run)) for run in record.runs))
    folder = Path(folders[0]) if len(folders) == 1 else Path()
    return record, write_report(record, out or folder / FILE_NAME)


def recipe_defaults(run: ReportedRun) -> dict[str, str]:
    """The default of every setting in the run's recipe; empty if the run names no known recipe.

    With init_from, the model's shape comes from that model, so it counts as a default.
    """
    from penjing.commands.train import resolve_run
    from penjing.recipes import RECIPES
    from penjing.report.load_run import flatten

    stage, preset = run.settings.get("stage", ""), run.settings.get("model.preset", "")
    if stage not in RECIPES:
        return {}
    try:
        recipe = f"{stage}:{preset.removeprefix(SIZE_PRESET)}" if stage == "ladder" else stage
        defaults = flatten(config.to_dict(resolve_run(recipe)))
    except UserError:
        return {}
    shape = {name: value for name, value in run.settings.items() if name.startswith("model.")}
    return defaults | shape if run.settings.get("init_from") else defaults
