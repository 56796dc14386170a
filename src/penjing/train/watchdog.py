"""Ends a run within a minute if a rank is dead or stuck, and names the rank, its step and the reason, with its stack.

Every rank has a thread that reports its progress to the others once a second, through a small store in rank 0, and
reads their reports. It does not use the collectives of training, so it detects hangs in them. It counts them: of ranks
that wait for each other, the one that began the fewest is the one that the others wait for.
"""

import faulthandler
import json
import math
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from penjing.base.errors import EXIT_FOLLOWED, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from penjing.base.process_info import run_once_per_launch, say
from penjing.parallel.base import Strategy
from penjing.train.signals import Ended, Stopped

BEAT_SECONDS = 1.0
LATE_SECONDS = 3.0  # a beat that is later than this says that the whole process was stopped, as by Ctrl-Z
SILENT_SECONDS = 20.0  # a rank without a message for this long is dead or stopped
STUCK_SECONDS = 45.0  # a run is stuck if a step takes this long, unless SLOWDOWN_FACTOR allows more
SLOW_FRACTION = 1 / 3  # of the time after which a rank is stuck: then it is called slow
SLOWDOWN_FACTOR = 5.0  # a step may take this many times the slowest step so far
FAILURE_WAIT_SECONDS = 3.0  # a failing rank waits this long, so that the others can read the reason
POLL_SECONDS = 0.05  # interval of checks whether all ranks are done
_FAILED, _DONE, _LEFT, _ABOUT = "failed", "done ", "left ", "about "
# The errors of a rank that lost another one: torch's own classes, and the texts of gloo's plain RuntimeErrors.
_LOST = re.compile(r"gloo|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


class LostRank(Ended):
    """This rank ends because another one did, which says why."""

    exit_code = EXIT_FOLLOWED


class Watchdog:
    """The loop calls `report_progress`; a rank that ends with an error calls `fail`."""

    def __init__(
        self, strategy: Strategy, *, silent_seconds: float = SILENT_SECONDS, stuck_seconds: float = STUCK_SECONDS
    ) -> None:
        """Start watching. All ranks call it together."""
        self.rank, self.world, strategy.untimed = strategy.rank, strategy.world, self._untimed
        self.silent_seconds, self.stuck_seconds = silent_seconds, stuck_seconds
        self.node = os.environ.get("GROUP_RANK", "0")
        self._step, self._longest_seconds, self._named_slow = 0, 0.0, False
        self._last_progress = self._last_unlimited = time.monotonic()
        self._launcher = os.getppid()
        self._stop = threading.Event()
        self._store = _make_store(strategy)
        self._store.set(str(self.rank), "")
        strategy.any(False)  # a barrier: every rank's key exists before another rank reads it
        self._last_messages = {rank: (b"", time.monotonic()) for rank in range(self.world) if rank != self.rank}
        self._beat = 0
        if not faulthandler.is_enabled():
            faulthandler.enable()  # a rank that crashes, or that another one ends, writes its stack
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def require_same(self, about: Mapping[str, Any]) -> None:
        """Raise UserError, on all ranks, if one has other values than rank 0; it names the first that differs."""
        self._store.set(f"{_ABOUT}{self.rank}", json.dumps(about))
        self._wait_for_all(_ABOUT)
        first, *others = (json.loads(self._store.get(f"{_ABOUT}{rank}")) for rank in range(self.world))
        for rank, theirs in enumerate(others, start=1):
            for name in sorted(first.keys() | theirs.keys()):
                if first.get(name) != theirs.get(name):
                    got = f"{theirs.get(name)} on rank {rank}, {first.get(name)} on rank 0"
                    wanted = "the same code and settings on all ranks"
                    raise UserError("the ranks differ", where=name, got=got, wanted=wanted)

    def report_progress(self, step: int, longest_seconds: float) -> None:
        """`step` steps are done, and the next call comes after about `longest_seconds` at most; 0: unlimited."""
        self._last_progress = time.monotonic()
        self._step, self._longest_seconds, self._named_slow = step, longest_seconds, False

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        longest_seconds = self._longest_seconds
        self.report_progress(self._step, 0.0)
        yield
        self.report_progress(self._step, longest_seconds)

    def fail(self, error: BaseException) -> LostRank | None:
        """Tell the other ranks that this one ends, and why. Only the first failure counts: another one is returned as
        what to raise instead, as it follows from the first."""
        line, code = "", EXIT_FOLLOWED
        if isinstance(error, UserError):
            line, code = error.line(), EXIT_USER_ERROR
        elif isinstance(error, Ended):
            line, code = str(error), error.exit_code
        elif isinstance(error, KeyboardInterrupt):
            line, code = "interrupted", EXIT_INTERRUPTED
        trace = "" if line else "".join(traceback.format_exception(error))[-4000:]
        about = {"rank": self.rank, "node": self.node, "step": self._step, "line": line, "trace": trace, "code": code}
        lost = LostRank(f"rank {self.rank}, {_location(self._step)}, lost another rank: {str(error)[:200]}")
        try:
            if _follows(error):
                until = time.monotonic() + FAILURE_WAIT_SECONDS
                while not self._store.check([_FAILED]) and time.monotonic() < until:
                    time.sleep(POLL_SECONDS)
                return lost
            if json.loads(self._store.compare_set(_FAILED, "", json.dumps(about)))["rank"] != self.rank:
                return None if line else lost  # a mistake in settings or data is found by every rank, and said once
        except Exception:  # the store ended with rank 0
            return lost if _follows(error) else None
        if trace:
            say(f"rank {self.rank} failed {_location(self._step)}:")
        time.sleep(FAILURE_WAIT_SECONDS)
        return None

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
        began = time.monotonic()
        while not self._stop.wait(BEAT_SECONDS):
            if (late := time.monotonic() - began - BEAT_SECONDS) > LATE_SECONDS:
                self._excuse(late)
            if os.getppid() != self._launcher and "TORCHELASTIC_RUN_ID" in os.environ:
                self._launcher = os.getppid()
                os.kill(os.getpid(), signal.SIGTERM)  # the launcher was killed: save and stop
            self._check()
            began = time.monotonic()

    def _excuse(self, seconds: float) -> None:
        """Forget a time in which this process was stopped, and perhaps all: Ctrl-Z and `fg` do not end a run."""
        self._last_progress += seconds
        self._last_unlimited += seconds
        self._last_messages = {rank: (text, since + seconds) for rank, (text, since) in self._last_messages.items()}

    def _check(self) -> None:
        """Report this rank's progress and read the others'; end the process if something is wrong."""
        self._beat += 1
        try:
            state: dict[str, Any] = {"beat": self._beat, "step": self._step, "limited": self._longest_seconds > 0}
            state |= {"collectives": _collectives(), "node": self.node, "process": os.getpid()}
            self._store.set(str(self.rank), json.dumps(state))
            failed = self._store.get(_FAILED) if self._store.check([_FAILED]) else b""
            for rank, (before, since) in self._last_messages.items():
                text = self._store.get(str(rank))
                self._last_messages[rank] = (text, time.monotonic() if text != before else since)
        except Exception as error:
            if self._stop.wait(BEAT_SECONDS):
                return
            self._end(
                f"rank 0 does not answer ({' '.join(str(error).split())[:200]}): it is dead or stopped", wait=True
            )
            return
        if failed:
            if json.loads(failed)["rank"] != self.rank:
                self._end_after(json.loads(failed))
            return
        others = {rank: json.loads(text) for rank, (text, _) in self._last_messages.items() if text}
        for rank, (_, since) in self._last_messages.items():
            if time.monotonic() - since > self.silent_seconds:
                self._end_silent(rank, others)
        # While one rank does work without a limit, the others may be waiting for it inside their next step.
        if len(others) < len(self._last_messages) or not all(state["limited"] for state in others.values()):
            self._last_unlimited = time.monotonic()
        allowed = max(self.stuck_seconds, SLOWDOWN_FACTOR * self._longest_seconds)
        waited = time.monotonic() - max(self._last_progress, self._last_unlimited)
        if self._longest_seconds and waited > SLOW_FRACTION * allowed:
            counts = {rank: other["collectives"] for rank, other in others.items()} | {self.rank: state["collectives"]}
            self._name_slowest([rank for rank in counts if counts[rank] == min(counts.values())], waited, allowed)

    def _name_slowest(self, slowest: list[int], waited: float, allowed: float) -> None:
        """Name the rank that the others wait for, with its stack; end the run if it takes longer than `allowed`."""
        names = f"rank {', '.join(map(str, slowest))}" if len(slowest) < self.world else "each rank"
        where = f"{_location(self._step)}: no step since {allowed if waited > allowed else waited:.0f} s"
        where += ", the others wait for it" if len(slowest) < self.world else ""
        if waited > allowed:
            stuck = self.rank in slowest
            code = 1 if stuck else EXIT_FOLLOWED
            self._end(f"{names} is stuck {where}", stacks=stuck, wait=not stuck, code=code)
        elif self.rank in slowest and len(slowest) < self.world and not self._named_slow:
            self._named_slow = True
            say(f"{names} is slow {where}")
            faulthandler.dump_traceback(all_threads=True)

    def _end_silent(self, silent: int, others: Mapping[int, Mapping[str, Any]]) -> None:
        """End the run because of a rank that tells nothing. On its machine it is ended, which makes it write its stack,
        also if it was stopped."""
        about = others.get(silent)
        where = _location(max(self._step, about["step"])) if about else "before its first message"
        if about and about["node"] == self.node:
            beside = [rank for rank, other in others.items() if other["node"] == self.node and rank != silent]
            if self.rank < min(beside, default=self.world):
                with suppress(ProcessLookupError):
                    os.kill(about["process"], signal.SIGABRT)
                    os.kill(about["process"], signal.SIGCONT)
        self._end(f"rank {silent} is silent since {self.silent_seconds:g} s, {where}", wait=True)

    def _end_after(self, failed: Mapping[str, Any]) -> None:
        """End because another rank failed. On its own machine it writes its traceback itself."""
        text = f"rank {failed['rank']} failed {_location(failed['step'])}"
        if failed["node"] != self.node:
            self._end(f"{text}: {failed['line'] or failed['trace']}", wait=True, code=failed["code"])
        self._end(failed["line"], wait=failed["code"] != EXIT_INTERRUPTED, code=failed["code"])

    def _end(self, why: str, *, wait: bool = False, stacks: bool = False, code: int = EXIT_FOLLOWED) -> None:
        """End this process. One rank of the machine says why; with `stacks` this one writes those of its threads.

        wait: the other rank ends first, so that the launcher names it, unless it hangs.
        """
        if self._stop.is_set():
            return
        if why:
            run_once_per_launch(lambda: say(why))
        if stacks:
            faulthandler.dump_traceback(all_threads=True)
        time.sleep(FAILURE_WAIT_SECONDS + 1 if wait else 0)
        os._exit(code)


def _follows(error: BaseException) -> bool:
    """Whether this error only says that another rank has ended."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
    )


def _collectives() -> int:
    """How many collectives this process has begun."""
    groups = list(distributed_c10d._world.pg_map) if distributed.is_initialized() else []
    return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]


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
def watched(strategy: Strategy, about: Mapping[str, Any] | None = None) -> Iterator[Callable[[int, float], None]]:
    """Watch the ranks while the work inside runs; yields `Watchdog.report_progress` for it. An error inside ends all
    ranks with its traceback. A single process is not watched. about: what must be the same on all ranks."""
    if strategy.world == 1:
        yield lambda step, longest_seconds: None
        return
    watchdog = Watchdog(strategy)
    try:
        if about:
            watchdog.require_same(about)
        yield watchdog.report_progress
        watchdog.finish()
    except Stopped:  # on all ranks alike
        watchdog.finish()
        raise
    except BaseException as error:
        if (lost := watchdog.fail(error)) is not None:
            raise lost from None
        raise
    finally:
        watchdog.close()
