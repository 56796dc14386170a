"""Runs a tracker that uses the network in its own thread, so that it can never stop training."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Mapping

from penjing.base.errors import UserError
from penjing.track.base import Tracker

MAX_PENDING = 1000  # logged steps; further ones are dropped until the tracker takes some
START_SECONDS = 30.0  # the run's longest wait for its start, so that a wrong setting is an error before step 1
END_SECONDS = 10.0  # the run's longest wait for its end


class BackgroundTracker:
    """Makes a tracker in a thread and passes it the logged metrics.

    A tracker that raises is not called again. A tracker that hangs loses metrics, but delays nothing.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        start_seconds: float = START_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        """Raises the UserError of `make` if it comes within `start_seconds`: the user can correct the setting."""
        self.name, self.end_seconds = name, end_seconds
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_PENDING)
        self._errors: list[BaseException] = []  # at most one: the error that ended the thread
        self._started = threading.Event()
        self._warned_full = False
        # A daemon thread, so that the process can end while the tracker hangs.
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        self._started.wait(start_seconds)
        if self._errors and isinstance(self._errors[0], UserError):
            raise self._errors.pop()
        self._warn_error()

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            self._started.set()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except BaseException as error:  # any kind: a library may even call sys.exit
            self._errors.append(error)
        finally:
            self._started.set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._warn_error()
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            if not self._warned_full:
                warnings.warn(f"{self.name} does not answer: its metrics are dropped for now", stacklevel=2)
            self._warned_full = True

    def close(self) -> None:
        """Wait up to `end_seconds` for pending metrics to be sent."""
        try:
            self._queue.put(None, timeout=self.end_seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(self.end_seconds)
        self._warn_error()
        if self._thread.is_alive():
            warnings.warn(f"{self.name} did not finish within {self.end_seconds:g} s and is abandoned", stacklevel=2)

    def _warn_error(self) -> None:
        if self._errors:
            error = self._errors.pop()
            warnings.warn(f"{self.name} failed and is left out from here on: {error}", stacklevel=3)
