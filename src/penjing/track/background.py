"""Runs trackers that use the network in threads, so that they can never stop training."""

import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penjing.base.errors import UserError
from penjing.track.base import Tracker, Trackers

MAX_PENDING = 1000  # calls that wait for a tracker; metrics beyond are dropped until it takes some


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Seconds."""

    # The run's longest waits for all trackers together: for their start, so that a wrong setting is an error before
    # step 1, and for their end.
    start: float = 1.0
    end: float = 30.0
    # A tracker's thread pauses after it has passed on all calls: with a call at a time, libraries that write in threads
    # of their own take twice the CPU time (10 ms for a row of 14 metrics in all five, against 4.4).
    pause: float = 5.0
    longest_pause: float = 60.0  # up to here it pauses so long that it takes at most this fraction of a core:
    core_fraction: float = 0.002
    stored: float = 5.0  # a library that is killed later than this after a call has stored what it was told
    save: float = 10.0  # between two writes of what a tracker has


class BackgroundTrackers(Trackers):
    """Makes each tracker in a thread of its own and passes it the calls.

    A tracker that raises is not called again. A tracker that hangs loses metrics, but delays nothing.
    """

    def __init__(self, makes: Mapping[str, Callable[[], Tracker]], delays: Delays | None = None) -> None:
        """makes: by name. Raises a UserError of theirs that comes before `delays.start`: the user can correct it."""
        delays = delays or Delays()
        self._end_seconds = delays.end
        self._threads = [_TrackerThread(name, make, delays) for name, make in makes.items()]
        deadline = time.monotonic() + delays.start
        for thread in self._threads:
            thread.started.wait(max(0.0, deadline - time.monotonic()))
            if isinstance(thread.error, UserError):
                raise thread.error
            thread.warn_error()

    def _call_all(self, method: str, *arguments: Any) -> None:
        for thread in self._threads:
            thread.warn_error()
            if thread.is_alive() and (method == "rewind" or not thread.is_full()):
                thread.calls.put((method, arguments))

    def end(self) -> None:
        """Wait a while for pending metrics to be sent."""
        deadline = time.monotonic() + self._end_seconds
        for thread in self._threads:
            thread.calls.put(None)
            thread.hurries.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            thread.warn_error()
            if thread.is_alive():
                warnings.warn(f"{thread.name} did not finish within {self._end_seconds:g} s: abandoned", stacklevel=2)


class _TrackerThread(threading.Thread):
    """Makes one tracker, and calls it until None comes."""

    def __init__(self, name: str, make: Callable[[], Tracker], delays: Delays) -> None:
        super().__init__(name=name, daemon=True)  # a daemon, so that the process can end while the tracker hangs
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.started = threading.Event()  # it is made, or failed
        self.hurries = threading.Event()  # no more pauses: the run ends
        self.error: BaseException | None = None
        self._make, self._delays, self._warned_full = make, delays, False
        self.start()

    def run(self) -> None:
        try:
            tracker = self._make()
            self.started.set()
            before = time.thread_time()
            while (call := self.calls.get()) is not None:
                method, arguments = call
                getattr(tracker, method)(*arguments)
                if self.calls.empty():
                    self._pause(time.thread_time() - before)
                    before = time.thread_time()
            tracker.end()
        except BaseException as error:  # any kind: a library may even call sys.exit
            self.error = error
        finally:
            self.started.set()

    def _pause(self, spent_seconds: float) -> None:
        wanted = min(spent_seconds / self._delays.core_fraction, self._delays.longest_pause)
        self.hurries.wait(max(self._delays.pause, wanted))

    def is_full(self) -> bool:
        """Whether the tracker is too far behind; warns the first time."""
        full = self.calls.qsize() >= MAX_PENDING
        if full and not self._warned_full:
            warnings.warn(f"{self.name} does not answer: its metrics are dropped for now", stacklevel=3)
            self._warned_full = True
        return full

    def warn_error(self) -> None:
        """Warn once of the error that ended the thread."""
        if self.error is not None:
            warnings.warn(f"{self.name} failed and is left out from here on: {self.error}", stacklevel=3)
            self.error = None
