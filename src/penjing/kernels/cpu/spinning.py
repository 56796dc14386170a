"""Lets the OpenMP threads of torch spin for long while cores are free, and shortly while other programs use them.

At the end of a parallel region each thread spins until the last one arrives. On free cores nothing is faster: without
spinning, a small model trained at 0.64 of its speed. On busy cores the spinning threads use the time slices that the
last one needs: beside three busy loops on two cores the same training ran at 0.07 of its speed, with short spinning at
0.24 to 0.33, of at most 0.4. libgomp spins shortly while it manages more threads than the process has CPUs. So this
module holds a second team of sleeping threads while the cores are busy.

Two threads also share one core then. There the one goes on as soon as the other waits for it; on two cores it may be
the other's core that is taken. The number of threads that compute stays the same, and so do all results.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penjing.base.process_info import thread_seconds
from penjing.kernels.cpu.library import openmp_library

INTERVAL_SECONDS = 0.25  # of long spinning, after which the waiting is looked at
BUSY = 0.25  # threads that wait for a core, on average; beside nothing 0.06, beside one busy loop on two cores 0.7
# Seconds of short spinning before the next try with long spinning: the first time, and at most. They double.
FIRST_SECONDS, MAX_SECONDS = 1.0, 8.0
REPORT_SECONDS = 10.0  # of busy cores, after which the user is told
REPORT = "other programs use the cores: the work continues on what is left; results stay the same"


class SpinControl(threading.Thread):
    """Holds the second team while this process's threads wait for cores. gomp_parallel: GOMP_parallel of the OpenMP
    library. report: gets REPORT, once."""

    def __init__(self, gomp_parallel: Callable[..., object]) -> None:
        super().__init__(name="penjing-spinning", daemon=True)
        self.gomp_parallel = gomp_parallel
        self.report: Callable[[str], None] | None = None
        self.cpus, self.bound = os.sched_getaffinity(0), set[int]()

    def run(self) -> None:
        is_busy, was_busy, busy_seconds, hold_seconds = False, False, 0.0, FIRST_SECONDS
        while look := _look():
            waiting, computing = look
            if (waiting >= BUSY) == was_busy:  # two looks alike: a disturbance of a moment changes nothing
                is_busy = was_busy
            was_busy = waiting >= BUSY
            if not is_busy:
                busy_seconds, hold_seconds = 0.0, FIRST_SECONDS
            if not (is_busy and was_busy):
                continue
            team = threading.Thread(target=self._hold, args=(hold_seconds,), daemon=True)
            team.start()
            if len(computing) == 2:
                self._bind(computing)
            team.join()
            self.unbind()
            busy_seconds, hold_seconds = busy_seconds + hold_seconds, min(2 * hold_seconds, MAX_SECONDS)
            if self.report is not None and busy_seconds >= REPORT_SECONDS:
                self.report(REPORT)
                self.report = None

    def _hold(self, seconds: float) -> None:
        """A team of more threads than there are CPUs, which do nothing and sleep. It ends with this thread."""
        no_work = ctypes.CDLL(None).free  # free(NULL) does nothing
        self.gomp_parallel(no_work, None, len(self.cpus) + 1, 0)
        time.sleep(seconds)

    def _bind(self, threads: list[int]) -> None:
        """Bind these threads to the CPU that the first of them ran on last."""
        with suppress(OSError):  # a thread that has ended; a system that does not tell
            stat = Path(f"/proc/self/task/{threads[0]}/stat").read_text()
            self.bound = {int(stat.rpartition(")")[2].split()[36])}
            for thread in threads:
                os.sched_setaffinity(thread, self.bound)

    def unbind(self) -> None:
        """Let the bound threads, and those that they have started since, run on all CPUs again."""
        for thread in map(int, os.listdir("/proc/self/task") if self.bound else ()):
            with suppress(OSError):
                if os.sched_getaffinity(thread) == self.bound:
                    os.sched_setaffinity(thread, self.cpus)
        self.bound = set()


def _look() -> tuple[float, list[int]] | None:
    """How many threads of this process could run but had no core, on average over the next INTERVAL_SECONDS, and the
    threads that could run for most of it. None if the system does not tell. Meaningless while the threads spin shortly:
    then they wait for each other's cores."""
    start, before = time.monotonic(), thread_seconds()
    time.sleep(INTERVAL_SECONDS)
    passed, seconds = thread_seconds(since=before), time.monotonic() - start
    waiting = sum(waited for _, waited in passed.values()) / seconds
    computing = [int(thread) for thread, times in passed.items() if sum(times) > seconds / 2]
    return (waiting, computing) if before else None


_control: SpinControl | None = None


def control(threads: int) -> None:
    """Control the spinning of `threads` threads from now on, where it is possible: with GNU's OpenMP on Linux."""
    global _control
    library = openmp_library()
    if threads == 1 or library is None or not Path(library).name.startswith("libgomp") or _control is not None:
        return
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return
    _control = SpinControl(ctypes.CDLL(library).GOMP_parallel)
    _control.start()


def report_busy_cores(report: Callable[[str], None]) -> None:
    """Pass one line to `report`, once, when other programs had the cores for REPORT_SECONDS."""
    if _control is not None:
        _control.report = report


def use_every_cpu() -> None:
    """For a program that the caller is about to start, which would be bound to its one CPU."""
    if _control is not None:
        _control.unbind()
