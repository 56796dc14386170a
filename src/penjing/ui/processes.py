"""Programs that the page starts: training, which outlives this server, and chat servers, which end with it."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penjing.base.files import disk_errors
from penjing.base.lock import LOCK, is_locked
from penjing.serve.errors import ApiError
from penjing.track.run_record import RunRecord
from penjing.ui.site import Site

LOG = "train.log"  # in a run's folder: what the programs that the page started have said
LOG_BYTES = 6_000  # of its end, shown
MOST_CHATS = 8
PROGRAM = (sys.executable, "-m", "penjing")
# For a program that ends with this server, also with one that was killed: the system then closes this end of its input.
ENDS_WITH_US = (
    "import os, signal, sys, threading\n"
    "ends = lambda: (sys.stdin.read(), os.kill(os.getpid(), signal.SIGTERM))\n"
    "threading.Thread(target=ends, daemon=True).start()\n"
)
SERVER = (sys.executable, "-c", ENDS_WITH_US + "from penjing.cli import main\nmain()")
_ADDRESS = re.compile(rb"chat page: (http://127\.0\.0\.1:\d+/)")


def command(words: Sequence[str]) -> str:
    """A command line of penjing, quoted for a shell."""
    return shlex.join(["penjing", *words])


def log_tail(run: Path) -> str:
    """The end of a run's log; empty if the page did not start it."""
    try:
        with open(os.open(run / LOG, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return _tail(file.fileno())
    except OSError:
        return ""


def _tail(file: int) -> str:
    """Of an open file, whose position, which a program may share, stays where it is."""
    return os.pread(file, LOG_BYTES, max(0, os.fstat(file).st_size - LOG_BYTES)).decode("utf-8", "replace")


class Trainings:
    """Trainings that this server has started. A run's lock says of all others whether they run."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def start(self, words: Sequence[str], out: Path, *, folder: Path | None = None) -> None:
        """Start `penjing WORDS` with a session of its own, in `folder`, writing into the run's folder `out`."""
        name = self.site.name(out)
        with self._lock:
            if self._is_alive(name) or is_locked(out):
                raise ApiError(409, f"{name}: this run is running", code="running")
            with disk_errors(out):
                out.mkdir(parents=True, exist_ok=True)
                log = os.open(out / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            try:
                os.write(log, f"$ {command(words)}\n".encode())
                self._started[name] = subprocess.Popen(
                    [*PROGRAM, *words],
                    cwd=folder or self.site.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            finally:
                os.close(log)

    def stop(self, run: Path) -> None:
        """Ask the program that trains in `run` to save and end. Raises ApiError if none does, here."""
        name = self.site.name(run)
        with self._lock:
            if is_locked(run):
                os.kill(_holder(run), signal.SIGTERM)
            elif self._is_alive(name):
                self._started[name].terminate()
            else:
                raise ApiError(409, f"{name}: this run is not running", code="not_running")

    def state(self, name: str) -> str:
        """starting: not at work yet, or about to end; failed: ended with an error; killed: before there was a run; else
        empty."""
        process = self._started.get(name)
        if process is None:
            return ""
        code = process.poll()
        if is_locked(self.site.folder / name):
            if code is not None:  # another program goes on with this run
                self._started.pop(name, None)
            return ""
        if code is None or 0 < code < 128:
            return "starting" if code is None else "failed"
        return "" if RunRecord(self.site.folder / name).exists else "killed"

    def names(self) -> list[str]:
        """Of those that run, or failed."""
        return [name for name, process in self._started.items() if process.poll() != 0]

    def _is_alive(self, name: str) -> bool:
        return name in self._started and self._started[name].poll() is None


def _holder(run: Path) -> int:
    """The process that holds a run's lock. The lock's file could name any process: the system must agree, where it
    tells (Linux). Raises ApiError for one on another machine."""
    lock = run / LOCK
    try:
        owner = json.loads(lock.read_bytes())
        pid, host = int(owner["pid"]), owner["host"]
    except (OSError, ValueError, KeyError, TypeError):
        pid, host = 0, ""
    is_told = Path("/proc/self/fd").is_dir()
    opened = Path(f"/proc/{pid}/fd").glob("*")
    if pid > 1 and host == socket.gethostname() and (not is_told or any(_is_same(file, lock) for file in opened)):
        return pid
    raise ApiError(409, "another process, or another machine, holds this run's lock", code="not_ours")


def _is_same(file: Path, other: Path) -> bool:
    try:
        return file.samefile(other)
    except OSError:
        return False


class Chat:
    """A `penjing serve` of one checkpoint, on this machine only."""

    def __init__(self, run: Path, name: str, step: int) -> None:
        self.name, self.step, self.log = name, step, tempfile.TemporaryFile()
        words = ["serve", f"{run}@{step}", "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen([*SERVER, *words], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log)

    @property
    def shown(self) -> dict[str, Any]:
        """state: starting, ready or ended. said: its last words, of one that ended by itself."""
        log = self.log.fileno()
        found, said = _ADDRESS.search(os.pread(log, LOG_BYTES, 0)), _tail(log)
        ended = self.process.poll() is not None
        state = "ended" if ended else "ready" if found else "starting"
        address = found[1].decode() if found and not ended else ""
        return {"run": self.name, "step": self.step, "state": state, "address": address, "said": said if ended else ""}


class Chats:
    """The chat servers of this page; one for each checkpoint."""

    def __init__(self) -> None:
        self._chats: dict[tuple[str, int], Chat] = {}
        self._lock = threading.Lock()

    def start(self, run: Path, name: str, step: int) -> None:
        with self._lock:
            there = self._chats.get((name, step))
            if there is not None and there.process.poll() is None:
                return
            if sum(chat.process.poll() is None for chat in self._chats.values()) >= MOST_CHATS:
                raise ApiError(409, f"{MOST_CHATS} models are open; stop one first", code="too_many")
            self._chats[name, step] = Chat(run, name, step)

    def stop(self, name: str, step: int) -> None:
        with self._lock:
            chat = self._chats.pop((name, step), None)
        if chat is not None:
            _end([chat])

    def list(self) -> list[dict[str, Any]]:
        with self._lock:
            return [chat.shown for chat in self._chats.values()]

    def close(self) -> None:
        with self._lock:
            _end(list(self._chats.values()))


def _end(chats: Sequence[Chat]) -> None:
    for chat in chats:
        chat.process.terminate()
    for chat in chats:
        try:
            chat.process.wait(5)
        except subprocess.TimeoutExpired:
            chat.process.kill()
