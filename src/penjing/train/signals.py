"""Ctrl-C, `kill`, a closed terminal, a scheduler: handled after the current step, so that its work is not lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the last: a scheduler needs the machine
ECHO_SECONDS = 1.0


def running_seconds() -> float:
    """A clock that stands still while Ctrl-Z has stopped the training."""
    return time.perf_counter() - Signals.seconds_stopped


class Ended(Exception):
    """The run ends, for a reason that takes one line."""

    exit_code: int


class Stopped(Ended):
    """A signal ended the run after a step and a checkpoint. `exit_code` is 128 + signal."""

    def __init__(self, number: int, step: int, *, saved: bool = True) -> None:
        self.exit_code = 128 + number
        outcome = "the same command continues" if saved else "the disk refused a checkpoint: it continues from the last"
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; {outcome}")


class _Interrupt(BaseException):
    """Raised by the handler inside interruptible work."""


class Signals:
    """Stores the first signal as `received`. A second one ends the process at once; this is safe, because files are
    replaced atomically.

    The same signal within a second is ignored as an echo: both the shell and the system report a closed terminal, and
    `timeout` signals a program and its group. A repeated SIGHUP is always an echo, because a terminal closes only once.
    """

    seconds_stopped: ClassVar[float] = 0.0  # of this process, by Ctrl-Z

    def __init__(self, *, alone: bool = True) -> None:
        """alone: whether no other rank waits for this one; several stop as the system stops them, all at once."""
        self._alone = alone

    def __enter__(self) -> Signals:
        self.received: int | None = None
        self._interruptible = False
        self._received_at = 0.0
        self._old_handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                # The parent process may have set a signal to be ignored, as nohup does with SIGHUP.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._old_handlers[number] = signal.signal(number, self._handle)
            if self._alone and signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                self._old_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        return self

    @staticmethod
    def _pause(number: int, frame: FrameType | None) -> None:
        began = time.perf_counter()
        os.kill(os.getpid(), signal.SIGSTOP)  # until `fg`
        Signals.seconds_stopped += time.perf_counter() - began

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            age = time.monotonic() - self._received_at
            if number == self.received and (number == signal.SIGHUP or age < ECHO_SECONDS):
                return
            os._exit(128 + number)
        self.received, self._received_at = number, time.monotonic()
        if self._interruptible:
            raise _Interrupt

    @contextmanager
    def interruptible(self, allowed: bool) -> Iterator[None]:
        """A signal interrupts the work inside, which must not change anything, such as a validation.

        allowed: False if other ranks take part in the work.
        """
        self._interruptible = allowed
        try:
            try:
                yield
            finally:
                self._interruptible = False
        except _Interrupt:  # raised inside or on leaving
            self._interruptible = False

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
