"""An HTML page about one run, or a comparison of several."""

from collections.abc import Sequence
from pathlib import Path

from penjing.base import config
from penjing.recipes import RECIPES
from penjing.report.html import FILE_NAME, write_report
from penjing.report.load_runs import ReportData, ReportedRun, read_record
from penjing.track.run_record import flatten
from penjing.workflows.train import resolve_run


def write_page(folders: Sequence[Path], out: Path | None = None) -> tuple[ReportData, Path]:
    """Write the page; returns what was read and the page's path. Raises UserError for a folder that is no run."""
    record = read_record(folders)
    for run in record.runs:
        run.defaults = recipe_defaults(run)
    folder = Path(folders[0]) if len(folders) == 1 else Path()
    return record, write_report(record, out or folder / FILE_NAME)


def recipe_defaults(run: ReportedRun) -> dict[str, str]:
    """The default of every setting in the run's recipe; empty if the run names no known recipe. With init_from, the
    model's shape comes from that model, so it counts as a default."""
    stage = run.settings.get("stage", "")
    if stage not in RECIPES:
        return {}
    defaults = flatten(config.to_dict(resolve_run(stage)))
    shape = {name: value for name, value in run.settings.items() if name.startswith("model.")}
    return defaults | shape if run.settings.get("init_from") else defaults
