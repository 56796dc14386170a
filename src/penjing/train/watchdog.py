"""No rank waits in silence for one that is dead or stuck: the run ends within a minute and says which, where and why.

Beside training every rank has a thread that tells the others once a second how far it is, through a small store in
rank 0, and looks at what they tell. It does not take part in the ranks' own exchanges, so it sees what hangs in them.
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
SILENT_SECONDS = 20.0  # a rank of which nothing is heard for so long is dead or stopped
STUCK_SECONDS = 45.0  # a run whose step takes so long is stuck, if none took a fifth of it before
SLOWEST_TIMES = 5.0  # times the slowest step so far, that the next may take
LINGER_SECONDS = 3.0  # a rank that fails waits so long, so that the others can read why
LEAVE_SECONDS = 0.05  # between two looks at whether all ranks are done
_FAILED, _DONE, _LEFT = "failed", "done ", "left "


class Watchdog:
    """Told by `edge` where the run is. `fail` is for the last words of a rank that ends with an error."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        silent_seconds: float = SILENT_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """Begins to watch. All ranks call it together."""
        self.rank, self.world = strategy.rank, strategy.world
        self.silent_seconds, self.stuck_seconds = silent_seconds, stuck_seconds
        self._step, self._longest_seconds = 0, 0.0
        self._edge = self._unlimited = time.monotonic()
        self._stop = threading.Event()
        self._store = _make_store(strategy)
        self._store.set(str(self.rank), "")
        strategy.any(False)  # every rank has said something: nobody asks for what is not there
        self._heard = {rank: (b"", time.monotonic()) for rank in range(self.world) if rank != self.rank}
        self._beat = 0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def edge(self, step: int, longest_seconds: float) -> None:
        """So many steps are done, and what comes next takes at most about so long; 0 seconds: nobody knows how long."""
        self._edge = time.monotonic()
        self._step, self._longest_seconds = step, longest_seconds

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends, and why; the first to do so is the one that counts."""
        bug = not isinstance(error, UserError)
        message = "\n" + "".join(traceback.format_exception(error))[-4000:] if bug else f" {error}"
        try:
            about = json.dumps({"rank": self.rank, "step": self._step, "why": message, "bug": bug})
            first = self._store.compare_set(_FAILED, "", about)
            if json.loads(first)["rank"] == self.rank:
                time.sleep(LINGER_SECONDS)
        except Exception:  # the store went with rank 0
            pass

    def leave(self) -> None:
        """Wait until all ranks are done: rank 0, which hashes and writes, would soon take one that left for dead. And
        rank 0 goes last, as the store goes with it."""
        try:
            self._store.set(f"{_DONE}{self.rank}", "")
            self._wait_for_all(_DONE)
            self.close()  # its thread asks the store too
            self._store.set(f"{_LEFT}{self.rank}", "")
            if self.rank == 0:
                self._wait_for_all(_LEFT, at_most=self.silent_seconds)
        except Exception:  # a store that is gone has nothing more to say
            pass

    def _wait_for_all(self, message: str, at_most: float = math.inf) -> None:
        until = time.monotonic() + at_most
        while not self._store.check([f"{message}{rank}" for rank in range(self.world)]) and time.monotonic() < until:
            time.sleep(LEAVE_SECONDS)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._look()

    def _look(self) -> None:
        """Tell the others how far this rank is, and look at what they tell; end the process if something is wrong."""
        self._beat += 1
        try:
            state = {"beat": self._beat, "step": self._step, "limited": self._longest_seconds > 0}
            self._store.set(str(self.rank), json.dumps(state))
            failed = self._store.get(_FAILED) if self._store.check([_FAILED]) else b""
            for rank, (before, since) in self._heard.items():
                text = self._store.get(str(rank))
                self._heard[rank] = (text, time.monotonic() if text != before else since)
        except Exception as error:
            if self._stop.wait(BEAT_SECONDS):
                return
            self._end(f"rank 0 does not answer ({' '.join(str(error).split())[:200]}): it is dead or stopped", 0)
            return
        if failed and json.loads(failed)["rank"] != self.rank:
            about = json.loads(failed)
            why = f"rank {about['rank']} failed {_after(about['step'])}:{about['why']}"
            self._end(why, about["rank"], stacks=about["bug"])
        for rank, (last_text, since) in self._heard.items():
            if time.monotonic() - since > self.silent_seconds:
                where = _after(json.loads(last_text)["step"]) if last_text else "before its first message"
                self._end(f"rank {rank} is silent since {self.silent_seconds:g} s, {where}", rank)
        others = {rank: json.loads(last_text) for rank, (last_text, _) in self._heard.items() if last_text}
        # While one rank writes or judges, the others may be waiting for it inside their next step.
        if len(others) < len(self._heard) or not all(each["limited"] for each in others.values()):
            self._unlimited = time.monotonic()
        allowed = max(self.stuck_seconds, SLOWEST_TIMES * self._longest_seconds)
        if self._longest_seconds and time.monotonic() - max(self._edge, self._unlimited) > allowed:
            steps = {rank: each["step"] for rank, each in others.items()}
            self._end(f"no step since {allowed:.0f} s; the others are after step {steps}", None)

    def _end(self, why: str, blamed: int | None, *, stacks: bool = True) -> None:
        """End this process with what is known: why, this rank's step, and what every thread was doing.

        stacks: not where the user has to change something, which the rank to blame says in one line.
        """
        if self._stop.is_set():
            return
        sys.stderr.write(f"\npenjing: rank {self.rank}, {_after(self._step)}, gives up: {why}\n")
        sys.stderr.flush()
        if stacks:
            faulthandler.dump_traceback(all_threads=True)
        # The rank that is to blame ends first, so that the launcher names it, unless it cannot.
        time.sleep(LINGER_SECONDS + 1 if blamed is not None else 0)
        os._exit(1)


def _after(step: int) -> str:
    return f"after step {step}" if step else "before step 1"


def _make_store(strategy: Strategy) -> TCPStore:
    """One store in rank 0, on a port that the system chooses."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    patience = timedelta(seconds=10)
    if strategy.rank == 0:
        store = TCPStore(host, 0, None, True, timeout=patience, wait_for_workers=False)
        strategy.broadcast(store.port)
        return store
    return TCPStore(host, strategy.broadcast(None), None, False, timeout=patience, wait_for_workers=False)


@contextmanager
def watched(strategy: Strategy) -> Iterator[Callable[[int, float], None]]:
    """Watch over the ranks while what is inside runs, which calls what is yielded as `Watchdog.edge`. An error inside
    ends all ranks with its traceback. One process has nobody to wait for."""
    if strategy.world == 1:
        yield lambda step, longest_seconds: None
        return
    watchdog = Watchdog(strategy)
    try:
        yield watchdog.edge
        watchdog.leave()
    except Stopped:  # on all ranks alike
        watchdog.leave()
        raise
    except BaseException as error:
        watchdog.fail(error)
        raise
    finally:
        watchdog.close()
