"""The runs below a folder, read as they grow. The truth is the run's folder: nothing is kept besides what was read."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.base.untrusted import text
from penjing.report.metrics import HELD_OUT, first_chart
from penjing.serve.errors import ApiError
from penjing.track.run_record import GrowingFigures, RunRecord
from penjing.ui.processes import LOG, Trainings
from penjing.ui.site import Site, is_shown

DEPTH = 3  # folders below the app's that are searched
READ_SECONDS = 0.2  # of metrics, before the list is shown
SEARCH_SECONDS = 2.0  # between searches for new runs
Column = tuple[NDArray[np.float64], NDArray[np.float64]]


class LiveRun:
    """One run: its metrics by name and step, and a row that describes it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._growing = GrowingFigures()
        self._columns: dict[str, Column] = {}
        self._lock = threading.Lock()
        self._seen: object = None
        self._row: dict[str, Any] = {}

    def read(self) -> RunRecord:
        """Take in what has been written since the last time; returns a fresh record of the other files."""
        record = RunRecord(self.path, problems=[])
        with self._lock:
            if self._growing.read(record):
                self._columns.clear()
        return record

    @property
    def metrics(self) -> dict[str, dict[int, float]]:
        return self._growing.by_name

    def column(self, metric: str) -> Column:
        """(steps, values) in the order of steps; empty for an unknown metric."""
        with self._lock:
            if metric not in self._columns:
                values = self.metrics.get(metric, {})
                steps = np.fromiter(values, float, len(values))
                order = np.argsort(steps, kind="stable")
                self._columns[metric] = steps[order], np.fromiter(values.values(), float, len(values))[order]
            return self._columns[metric]

    def last(self, metric: str) -> float | None:
        _, values = self.column(metric)
        return float(values[-1]) if len(values) else None

    def row(self, begun: str = "", *, read: bool = True) -> dict[str, Any]:
        """What the list of runs shows. `version` changes with every file. begun: the state of a process of the page.
        read: else what is new in the metrics is left for another time, and `version` is empty."""
        record = RunRecord(self.path, problems=[])
        folder = record.folder
        files = [folder.settings, folder.plan, folder.outcome, folder.ended]
        files += [folder.metrics, folder.samples, folder.incidents, folder.checkpoints]
        seen = [*map(_signature, files), record.is_running, begun]
        if seen != self._seen:
            record = self.read() if read else record
            self._row = self._make_row(record, begun) | {"version": f"{time.time_ns()}" if read else ""}
            self._seen = seen if read else None
        return self._row

    def _make_row(self, record: RunRecord, begun: str) -> dict[str, Any]:
        steps, _ = self.column("tokens")
        step = record.reached(int(steps[-1]) if len(steps) else 0)
        settings, files = record.settings, record.folder
        written = [stamp[0] for file in (files.metrics, files.settings, files.outcome) if (stamp := _signature(file))]
        main, used = first_chart(self.metrics), record.delivered
        followed = used and first_chart((used.metric,))
        held_out = main is not None and HELD_OUT + main.metric in self.metrics
        figure = main and {**asdict(main), "value": self.last(HELD_OUT * held_out + main.metric), "held_out": held_out}
        begun_at, _ = _signature(files.path) or (0, 0)
        return {
            "id": self.name,
            "state": begun or (record.state(step) if record.exists or record.is_running else "failed"),
            "stage": text(settings.get("stage", "")),
            "step": step,
            "steps": record.plan.number("steps"),
            "parameters": record.plan.number("parameters"),
            "figure": figure,
            "seconds_left": self.last("seconds_left"),
            "tokens_per_second": self.last("tokens_per_second"),
            "checkpoints": record.checkpoints[:50],
            "delivered": used and {**used._asdict(), **(asdict(followed) if followed else {})},
            "written": max(written, default=begun_at) / 1e9,
        }


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


class LiveRuns:
    """All runs at and below the folder of a site."""

    def __init__(self, site: Site, trainings: Trainings) -> None:
        self.site, self.trainings = site, trainings
        self._runs: dict[str, LiveRun] = {}
        self._lock = threading.Lock()
        self._searched = 0.0

    def rows(self, *, search: bool = False) -> list[dict[str, Any]]:
        """A row for each run, the newest first. search: also for runs that have just begun."""
        with self._lock:
            if search or time.monotonic() - self._searched > SEARCH_SECONDS:
                found = {name: self.site.folder / name for name in self.trainings.names()}
                found |= {self.site.name(path): path for path in _folders_of_runs(self.site.folder)}
                self._runs = {name: self._runs.get(name) or LiveRun(path, name) for name, path in found.items()}
                self._searched = time.monotonic()
            began, rows = time.monotonic(), []
            for run in self._runs.values():
                read = time.monotonic() - began < READ_SECONDS  # long runs come one after the other
                rows.append(run.row(self.trainings.state(run.name), read=read))
            return sorted(rows, key=lambda row: -row["written"])

    def run(self, name: str) -> LiveRun:
        """The run of that name. Raises ApiError: 403 for a path outside, 404 if there is none."""
        path = self.site.path(name)
        name = self.site.name(path)
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                if not RunRecord(path).exists and not isfile(path / LOG):
                    raise ApiError(404, f"{name[:200]}: no run in this folder", code="no_run")
                run = self._runs[name] = LiveRun(path, name)
        return run


def _folders_of_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folders of runs at and below `folder`, and of starts that failed before there was a run: they hold the log
    alone. No link is followed, nor into a run or a folder that is not shown."""
    is_run, inner = RunRecord(folder).exists, list[Path]()
    with suppress(OSError):
        if depth and not is_run:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [run for path in inner if is_shown(path.name) for run in _folders_of_runs(path, depth - 1)]
    yield from found or [folder] * (is_run or isfile(folder / LOG))
