"""The runs of the folder, as their files tell them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from penjing.track.run_record import RunRecord
from penjing.ui.site import Site

DEPTH = 3  # folders below the app's that are searched


def add_routes(app: FastAPI, site: Site) -> None:
    @app.get("/api/runs")
    def list_runs() -> dict[str, Any]:
        return {"folder": str(site.folder), "runs": [{"id": site.name(path)} for path in runs_below(site.folder)]}


def runs_below(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folders of runs at and below `folder`. A link is not followed."""
    if RunRecord(folder).exists:
        yield folder
    if depth:
        try:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:
            return
        for path in inner:
            if not path.name.startswith("."):
                yield from runs_below(path, depth - 1)
