"""Trackio, a local dashboard. Needs `pip install "penjing[trackio]"`; `TRACKIO_DIR=RUN/trackio trackio show`."""

import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from penjing.track.markdown import LibraryRun


class Trackio(LibraryRun):
    """A database in `trackio/` of the run's folder, or in TRACKIO_DIR. With TRACKIO_SPACE_ID or TRACKIO_SERVER_URL the
    run goes there instead, and steps that a resumed run repeats are there twice."""

    package: ClassVar = "trackio"

    def load(self, folder: Path) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve() / "trackio"))  # read when trackio is imported
        super().load(folder)

    def start(self, folder: Path, *, project: str, name: str, config: dict[str, Any], run_id: str) -> None:
        import trackio

        self._trackio, self._markdown, self._project = trackio, trackio.Markdown, project
        self._begin = partial(
            trackio.init,
            project=project,
            name=f"{name or folder.name}-{run_id}",  # it knows a run by its name
            config=config,
            resume="allow",
            auto_log_gpu=False,  # the run's own metrics have the system's
            auto_log_cpu=False,
            embed=False,
        )
        self._run = self._begin()

    def held(self, step: int) -> int:
        last = self._trackio.SQLiteStorage.get_max_step_for_run(self._project, self._run.name, run_id=self._run.id)
        return min(step, -1 if last is None else int(last))

    def attach(self, path: Path) -> None:
        if path.suffix == ".html":
            self._run.log({path.stem: self._trackio.Html(path.read_text(encoding="utf-8"))}, step=self._step)

    def rewind(self, step: int) -> None:
        """Delete the later steps in the database, which trackio has no call for."""
        self._run.finish()
        file = self._trackio.SQLiteStorage.get_project_db_path(self._project)
        if file.is_file():
            with closing(sqlite3.connect(file, timeout=30)) as database, database:
                database.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (self._run.id, step))
        self._run = self._begin()
