"""Ends a run within a minute if a rank is dead or stuck, with a message that names the rank, its step and the reason.

Every rank has a thread that reports its progress to the others once a second, through a small store in rank 0, and
reads their reports. It does not use the collectives of training, so it detects hangs in them.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penjing.base.errors import UserError
from penjing.parallel.base import Strategy
from penjing.train.signals import Stopped

BEAT_SECONDS = 1.0
SILENT_SECONDS = 20.0  # a rank without a message for this long is dead or stopped
STUCK_SECONDS = 45.0  # a run is stuck if a step takes this long, unless SLOWDOWN_FACTOR allows more
SLOWDOWN_FACTOR = 5.0  # a step may take this many times the slowest step so far
FAILURE_WAIT_SECONDS = 3.0  # a failing rank waits this long, so that the others can read the reason
POLL_SECONDS = 0.05  # interval of checks whether all ranks are done
_FAILED, _DONE, _LEFT = "failed", "done ", "left "


class Watchdog:
    """The loop calls `report_progress`; a rank that ends with an error calls `fail`."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        silent_seconds: float = SILENT_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """Start watching. All ranks call it together."""
        self.rank, self.world = strategy.rank, strategy.world
        self.silent_seconds, self.stuck_seconds = silent_seconds, stuck_seconds
        self._step, self._longest_seconds = 0, 0.0
        self._last_progress = self._last_unlimited = time.monotonic()
        self._stop = threading.Event()
        self._store = _make_store(strategy)
        self._store.set(str(self.rank), "")
        strategy.any(False)  # a barrier: every rank's key exists before another rank reads it
        self._last_messages = {rank: (b"", time.monotonic()) for rank in range(self.world) if rank != self.rank}
        self._beat = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def report_progress(self, step: int, longest_seconds: float) -> None:
        """`step` steps are done, and the next call comes after about `longest_seconds` at most; 0: unlimited."""
        self._last_progress = time.monotonic()
        self._step, self._longest_seconds = step, longest_seconds

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends, and why. Only the first failure is reported."""
        bug = not isinstance(error, UserError)
        message = "\n" + "".join(traceback.format_exception(error))[-4000:] if bug else f" {error}"
        try:
            about = json.dumps({"rank": self.rank, "step": self._step, "why": message, "bug": bug})
            first = self._store.compare_set(_FAILED, "", about)
            if json.loads(first)["rank"] == self.rank:
                time.sleep(FAILURE_WAIT_SECONDS)
        except Exception:  # the store ended with rank 0
            pass

    def finish(self) -> None:
        """Wait until all ranks are done: rank 0, which hashes and writes, would report a rank that has ended as dead.
        Rank 0 ends last, because the store ends with it."""
        try:
            self._store.set(f"{_DONE}{self.rank}", "")
            self._wait_for_all(_DONE)
            self.close()  # its thread uses the store too
            self._store.set(f"{_LEFT}{self.rank}", "")
            if self.rank == 0:
                self._wait_for_all(_LEFT, timeout=self.silent_seconds)
        except Exception:  # the store has ended
            pass

    def _wait_for_all(self, message: str, timeout: float = math.inf) -> None:
        until = time.monotonic() + timeout
        while not self._store.check([f"{message}{rank}" for rank in range(self.world)]) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._check()

    def _check(self) -> None:
        """Report this rank's progress and read the others'; end the process if something is wrong."""
        self._beat += 1
        try:
            state = {"beat": self._beat, "step": self._step, "limited": self._longest_seconds > 0}
            self._store.set(str(self.rank), json.dumps(state))
            failed = self._store.get(_FAILED) if self._store.check([_FAILED]) else b""
            for rank, (before, since) in self._last_messages.items():
                text = self._store.get(str(rank))
                self._last_messages[rank] = (text, time.monotonic() if text != before else since)
        except Exception as error:
            if self._stop.wait(BEAT_SECONDS):
                return
            self._end(f"rank 0 does not answer ({' '.join(str(error).split())[:200]}): it is dead or stopped", 0)
            return
        if failed and json.loads(failed)["rank"] != self.rank:
            about = json.loads(failed)
            why = f"rank {about['rank']} failed {_location(about['step'])}:{about['why']}"
            self._end(why, about["rank"], stacks=about["bug"])
        for rank, (last_text, since) in self._last_messages.items():
            if time.monotonic() - since > self.silent_seconds:
                where = _location(json.loads(last_text)["step"]) if last_text else "before its first message"
                self._end(f"rank {rank} is silent since {self.silent_seconds:g} s, {where}", rank)
        others = {rank: json.loads(last_text) for rank, (last_text, _) in self._last_messages.items() if last_text}
        # While one rank does work without a limit, the others may be waiting for it inside their next step.
        if len(others) < len(self._last_messages) or not all(state["limited"] for state in others.values()):
            self._last_unlimited = time.monotonic()
        allowed = max(self.stuck_seconds, SLOWDOWN_FACTOR * self._longest_seconds)
        if self._longest_seconds and time.monotonic() - max(self._last_progress, self._last_unlimited) > allowed:
            steps = {rank: state["step"] for rank, state in others.items()}
            self._end(f"no step since {allowed:.0f} s; the others are after step {steps}", None)

    def _end(self, why: str, culprit: int | None, *, stacks: bool = True) -> None:
        """End this process with a message: the reason, this rank's step, and every thread's stack.

        stacks: False for a user error, which the failed rank reports in one line.
        """
        if self._stop.is_set():
            return
        sys.stderr.write(f"\npenjing: rank {self.rank}, {_location(self._step)}, gives up: {why}\n")
        sys.stderr.flush()
        if stacks:
            faulthandler.dump_traceback(all_threads=True)
        # The culprit ends first, so that the launcher names it, unless it hangs.
        time.sleep(FAILURE_WAIT_SECONDS + 1 if culprit is not None else 0)
        os._exit(1)


def _location(step: int) -> str:
    return f"after step {step}" if step else "before step 1"


def _make_store(strategy: Strategy) -> TCPStore:
    """The store in rank 0, on a port that the system chooses."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    timeout = timedelta(seconds=10)
    if strategy.rank == 0:
        store = TCPStore(host, 0, None, True, timeout=timeout, wait_for_workers=False)
        strategy.broadcast(store.port)
        return store
    return TCPStore(host, strategy.broadcast(None), None, False, timeout=timeout, wait_for_workers=False)


@contextmanager
def watched(strategy: Strategy) -> Iterator[Callable[[int, float], None]]:
    """Watch the ranks while the work inside runs; yields `Watchdog.report_progress` for it. An error inside ends all
    ranks with its traceback. A single process is not watched."""
    if strategy.world == 1:
        yield lambda step, longest_seconds: None
        return
    watchdog = Watchdog(strategy)
    try:
        yield watchdog.report_progress
        watchdog.finish()
    except Stopped:  # on all ranks alike
        watchdog.finish()
        raise
    except BaseException as error:
        watchdog.fail(error)
        raise
    finally:
        watchdog.close()
