"""Watch runs in the terminal while another process trains them."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from penjing.base.errors import UserError
from penjing.base.lock import is_locked
from penjing.report.live import LiveRun, runs_view
from penjing.track.run_record import find_runs


def watch(folders: Sequence[Path], console: Console, *, seconds: float = 1.0) -> None:
    """Show the runs, and what is new every so many seconds, until none of them runs or Ctrl-C is pressed.

    Without a terminal, and if nothing runs, they are shown once. Raises UserError for a folder that is no run.
    """
    runs = _found(folders, {})

    def view() -> object:
        size = console.size
        return runs_view(list(runs.values()), size.width, size.height - 1, ascii_only=console.options.ascii_only)

    if not console.is_terminal or not _is_running(folders, runs):
        console.print(view())
        return
    try:
        with Live(console=console, auto_refresh=False, get_renderable=view, vertical_overflow="crop") as live:  # type: ignore[arg-type]
            while _is_running(folders, runs):
                time.sleep(seconds)
                with suppress(UserError):  # a folder that was deleted meanwhile
                    runs = _found(folders, runs)
                for run in runs.values():
                    run.update()
                live.refresh()
    except KeyboardInterrupt:
        pass  # the way to leave; the runs go on


def _found(folders: Sequence[Path], known: dict[Path, LiveRun]) -> dict[Path, LiveRun]:
    """The runs in these folders; one of a quickstart may have begun since the last look."""
    paths = [record.folder.path for folder in folders for record in find_runs(folder)]
    return {path: known.get(path) or LiveRun(path) for path in paths}


def _is_running(folders: Sequence[Path], runs: dict[Path, LiveRun]) -> bool:
    return any(run.is_running for run in runs.values()) or any(map(is_locked, folders))
