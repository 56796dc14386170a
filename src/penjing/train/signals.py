"""Ctrl-C, `kill` and a closed terminal: noted for the edge of the step, so that the step and its work are kept."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 1.0


class Stopped(Exception):
    """A signal ended the run at the edge of a step, after a checkpoint. `exit_code` is 128 + signal."""

    def __init__(self, number: int, step: int, *, saved: bool = True) -> None:
        self.exit_code = 128 + number
        kept = "the same command continues" if saved else "the disk refused a checkpoint: it continues from the last"
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; {kept}")


class _CutShort(BaseException):
    """Raised by the handler inside work that may be broken off."""


class Signals:
    """Notes the first signal as `received`; a second one ends the process at once, which harms nothing: every file is
    written beside the one it replaces.

    The same one within a second is an echo of the first: a shell passes the end of its terminal on and so does the
    system, and `timeout` signals a program and its group. A terminal ends but once, so SIGHUP again is always that.
    """

    def __enter__(self) -> Signals:
        self.received: int | None = None
        self._may_cut = False
        self._at = 0.0
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                # Who started us may have wanted one ignored: nohup does that with SIGHUP.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == self.received and (number == signal.SIGHUP or time.monotonic() - self._at < ECHO_SECONDS):
                return
            os._exit(128 + number)
        self.received, self._at = number, time.monotonic()
        if self._may_cut:
            raise _CutShort

    @contextmanager
    def cuts_short(self, allowed: bool) -> Iterator[None]:
        """Work inside that changes nothing, such as a validation, is broken off by a signal instead of awaited.

        allowed: not where other ranks take part in it.
        """
        self._may_cut = allowed
        try:
            try:
                yield
            finally:
                self._may_cut = False
        except _CutShort:  # raised inside, or on the way out
            self._may_cut = False

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
