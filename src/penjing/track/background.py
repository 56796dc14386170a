"""A tracker that talks to a network, in a thread of its own: whatever it does or does not do, training goes on."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Mapping

from penjing.base.errors import UserError
from penjing.track.base import Tracker

MOST_WAITING = 1000  # logged steps; further ones are left out while the tracker does not take them
START_SECONDS = 30.0  # the run waits so long for it to begin, so that a wrong setting is an error before step 1
END_SECONDS = 10.0  # and so long for it to finish


class BackgroundTracker:
    """Makes a tracker in a thread, and hands it there what is logged.

    A tracker that raises is left out from then on; one that hangs costs nothing but the lines it does not take.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        *,
        start_seconds: float = START_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        """Raises what `make` raises if that is a UserError and comes soon: something the user can put right."""
        self.name, self.end_seconds = name, end_seconds
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._errors: list[BaseException] = []  # at most one; the thread's last word
        self._started = threading.Event()
        self._warned_full = False
        # A daemon: the process may end while the tracker hangs.
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        self._started.wait(start_seconds)
        if self._errors and isinstance(self._errors[0], UserError):
            raise self._errors.pop()
        self._say_error()

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            self._started.set()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except BaseException as error:  # of whatever kind: a library may even call sys.exit
            self._errors.append(error)
        finally:
            self._started.set()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._say_error()
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, dict(figures)))
        except queue.Full:
            if not self._warned_full:
                warnings.warn(f"{self.name} does not answer: its figures are left out for now", stacklevel=2)
            self._warned_full = True

    def close(self) -> None:
        """Wait a little for what is left to be sent."""
        try:
            self._queue.put(None, timeout=self.end_seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(self.end_seconds)
        self._say_error()
        if self._thread.is_alive():
            warnings.warn(f"{self.name} did not finish within {self.end_seconds:g} s and is left behind", stacklevel=2)

    def _say_error(self) -> None:
        if self._errors:
            error = self._errors.pop()
            warnings.warn(f"{self.name} failed and is left out from here on: {error}", stacklevel=3)
