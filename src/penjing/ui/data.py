"""The tab data: the data files of the folder, what `penjing data look` says of one, and a dry run of `data clean`."""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from penjing.base.errors import UserError
from penjing.base.files import read_json as read_json_file
from penjing.data.clean import RULES
from penjing.data.formats.files import CLEANING, format_of
from penjing.report.charts import POLICY
from penjing.report.load_runs import QUICKSTART
from penjing.serve.errors import ApiError
from penjing.track.run_record import RunRecord
from penjing.ui.background import penjing_json
from penjing.ui.blind import VOTES
from penjing.ui.site import Body, Site, is_shown, text_field

DEPTH, MOST_FILES, MOST_ENTRIES = 6, 500, 20_000  # folders below the app's that are searched; listed; looked at
SECONDS = 900.0  # of a program, which a person can cancel
MOST_BYTES = 64 << 20  # of the counts of a cleaning, and of its report
REPORT_HEADERS = {"Content-Security-Policy": f"sandbox allow-scripts; {POLICY}"}


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders with the names of their files, sorted; what is not shown, links, and what a run wrote are left out."""
    for found, folders, files in os.walk(folder):
        depth = len(Path(found).relative_to(folder).parts)
        folders[:] = sorted(
            name
            for name in folders
            if depth < DEPTH and name[0] != "_" and is_shown(name) and not RunRecord(Path(found, name)).exists
        )
        yield found, sorted(filter(is_shown, files if QUICKSTART not in files else ()))


def files_below(folder: Path) -> dict[str, Any]:
    """Data files of a folder, each with its bytes, and folders that hold a cleaned corpus.

    {"files": [{"path", "bytes"}], "cleaned": [path], "is_cut": whether there are more}; paths are relative.
    """
    files: list[dict[str, Any]] = []
    cleaned: list[str] = []
    entries, is_cut = 0, False
    for found, names in _walk(folder):
        if Path(found, CLEANING, "counts.json").is_file():
            cleaned.append(Path(found).relative_to(folder).as_posix())
        entries += len(names)
        for name in names:
            path = Path(found, name)
            with suppress(OSError):  # it may vanish meanwhile
                if not path.is_symlink() and _is_data(path):
                    files.append({"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size})
        if len(files) > MOST_FILES or entries > MOST_ENTRIES:
            is_cut = True
            break
    return {"files": files[:MOST_FILES], "cleaned": cleaned, "is_cut": is_cut}


def _is_data(path: Path) -> bool:
    """Whether a corpus may be in this format. Programs and pages may be data, but are rarely meant."""
    name = path.name.lower()
    try:
        return format_of(path) not in ("py", "html", "md") and not name.startswith(("readme", "license", VOTES))
    except UserError:
        return False


def add_routes(app: FastAPI, site: Site) -> None:
    """Routes below /api/data, and /report, where a new window shows a page of the folder."""

    @app.get("/api/data/files")
    def files() -> dict[str, Any]:
        return {"folder": str(site.folder), "rules": list(RULES), **files_below(site.folder)}

    @app.post("/api/data/look")
    async def look(request: Request, body: Body) -> dict[str, Any]:
        """`data look` for the body's path, and perhaps tokenizer (a folder) and columns."""
        words = ["data", "look", str(site.path(text_field(body, "path"))), "--json"]
        if body.get("tokenizer"):
            words += ["--tokenizer", str(site.path(text_field(body, "tokenizer")))]
        if body.get("columns"):
            words += [f"--columns={text_field(body, 'columns')}"]
        return await penjing_json(request, words, site.folder, SECONDS)

    @app.post("/api/data/clean")
    async def clean(request: Request, body: Body) -> dict[str, Any]:
        """`data clean --dry-run` for the body's path, with its rule."""
        path, rule = site.path(text_field(body, "path")), text_field(body, "rule")
        if rule not in ("default", *RULES):
            raise ApiError(400, "rule: the name of a cleaning rule is required", param="rule")
        words = ["data", "clean", str(path), "--dry-run", "--json", "--workers", "1", "--pipeline", rule]
        return await penjing_json(request, words, site.folder, SECONDS)

    @app.get("/api/data/cleaning")
    def finished(folder: str) -> dict[str, Any]:
        """What a finished cleaning counted, and where its report is."""
        cleaned = site.path(folder) / CLEANING
        counts = cleaned / "counts.json"
        if not counts.is_file() or counts.stat().st_size > MOST_BYTES:
            raise ApiError(404, f"{folder[:200]}: no cleaned corpus", param="folder")
        return {"cleaned": [read_json_file(counts)], "report": site.name(cleaned / "report.html")}

    @app.post("/api/data/report")
    def offer_report(body: Body) -> dict[str, str]:
        path = site.path(text_field(body, "path"))
        if path.name != "report.html" or not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise ApiError(404, f"{path.name[:200]}: no report", param="path")
        address = f"/report/{secrets.token_urlsafe(16)}"
        site.open_once[address] = path
        return {"address": address}

    @app.get("/report/{_}")
    def report(request: Request) -> Response:
        path = site.open_once.pop(request.url.path, None)
        if path is None:
            raise ApiError(404, "this address was opened before")
        return HTMLResponse(path.read_bytes(), headers={**REPORT_HEADERS, "Cache-Control": "no-store"})
