"""Runs trackers in a process of their own, which shares no lock of Python with training."""

import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, Self

from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.track.background import BackgroundTrackers, Delays
from penjing.track.base import Tracker, Trackers
from penjing.track.resumable import ResumableTracker

DELAYS = Delays()
# Beside training that uses all cores it gets a tenth of one. With the lowest, 1.5 %, it would need minutes where other
# programs are busy too.
NICENESS = 10
EXIT_SECONDS = 5.0  # for the process after its trackers' end
_PROCESS = """
import sys
number, *sys.path[:] = sys.argv[1:]
from penjing.track.process import serve
serve(int(number))
"""


class TrackerProcess(Trackers):
    """A process that imports the trackers' packages while data are prepared, and after `begin` receives the calls."""

    def __init__(self, places: Mapping[str, str], folder: Path) -> None:
        """places: where each tracker is, by name. folder: of the run."""
        self._connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-c", _PROCESS, str(theirs.fileno()), *sys.path]
        # Of another group, as Ctrl-C ends the training first. Of the same session: Linux shares cores between sessions
        # before it looks at niceness.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0)
        theirs.close()
        self._connection.send((places, folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def begin(self, resumed_step: int, **settings: Any) -> BackgroundTrackers:
        """Start the trackers; what comes back passes calls on to them, and waits for nobody. settings: of
        `Tracker.start`. Raises a UserError of theirs that comes soon."""

        def make() -> Tracker:
            self._connection.send((DELAYS, resumed_step, settings))
            reply = self._connection.recv()
            if isinstance(reply, UserError):
                raise reply
            return self

        delays = replace(DELAYS, pause=0.0, longest_pause=0.0, end=DELAYS.end + EXIT_SECONDS)
        return BackgroundTrackers({"the trackers' process": make}, delays)

    def _call_all(self, method: str, *arguments: Any) -> None:
        self._connection.send((method, arguments))
        while self._connection.poll():
            warnings.warn(self._connection.recv(), stacklevel=2)

    def end(self) -> None:
        """Wait until the process has ended."""
        with suppress(EOFError):
            self._call_all("end")
            while True:
                warnings.warn(self._connection.recv(), stacklevel=2)


def serve(number: int) -> None:
    """What the process does. number: of the file of its connection."""
    os.set_inheritable(number, False)
    os.nice(NICENESS)
    connection = Connection(number)
    try:
        _serve(connection)
    except (EOFError, OSError):  # the training was killed: as if this were a part of it
        os._exit(1)


def _serve(connection: Connection) -> None:
    places, folder = connection.recv()
    for name in places:
        with suppress(Exception):  # `start` raises it again
            look_up(places, name, what="tracker")().load(folder)
    delays, step, settings = connection.recv()

    def start(name: str) -> Tracker:
        tracker = ResumableTracker(name, look_up(places, name, what="tracker")(), folder, step, delays)
        tracker.start(folder, **settings)
        return tracker

    try:
        trackers = BackgroundTrackers({name: partial(start, name) for name in places}, delays)
    except UserError as error:
        connection.send(error)
        return
    connection.send(None)
    lock = Lock()

    def warn(message: Warning | str, *_: Any) -> None:
        with lock:
            connection.send(str(message))

    warnings.showwarning = warn  # type: ignore[assignment]
    method = ""
    while method != "end":
        method, arguments = connection.recv()
        getattr(trackers, method)(*arguments)
