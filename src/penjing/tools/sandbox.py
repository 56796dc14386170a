"""Run code that a model wrote: in a process that can reach nothing, for a short while, and never in this one."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penjing.base.errors import UserError

OUTPUT_BYTES = 1 << 20  # of what it prints, and of each file it writes
MOST_FILES = 256  # in its folder; one that makes more is ended, as it would fill the disk
_CHILD = Path(__file__).with_name("sandbox_child.py")
_WALL = 3.0  # the clock may run this many times as long as the CPU, for a busy machine; a sleeping program ends too
_LOOK_SECONDS = 0.1  # between looks into its folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a program went. finished: it came to its end by itself, without an error and without an exit on the way.

    `finished` is reported by the process that ran the program. One that leaves early cannot say it by accident, nor by
    writing to whatever is open; one that takes its own interpreter apart still can. What cannot be forged is output
    that is compared with what the program has never seen.
    """

    finished: bool
    output: str
    errors: str
    timed_out: bool
    shut: dict[str, str] = field(default_factory=dict)  # by what means network and files were shut


def run(code: str, *, stdin: str = "", cpu_seconds: float = 5.0, memory_mebibytes: int = 512) -> Ran:
    """Run Python `code` shut in (see tools/sandbox_child.py), and end it and all it started after the time is over.

    It has an empty environment, a folder of its own, `stdin`, the standard library, and nothing else.
    Raises UserError where the system cannot shut a program in: then no code is run.
    """
    if sys.platform != "linux":
        raise _cannot({"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform))
    with tempfile.TemporaryDirectory(prefix="penjing-sandbox-") as outer:
        folder = Path(outer) / "own"
        folder.mkdir()
        os.chmod(outer, 0o711)
        os.chmod(folder, 0o777)  # the program may run as nobody
        (folder / "answer.py").write_text(code, encoding="utf-8")
        (Path(outer) / "stdin").write_text(stdin, encoding="utf-8")
        word = secrets.token_hex(16)  # that says the program is through
        limits = (max(1, round(cpu_seconds + 0.5)), memory_mebibytes << 20, OUTPUT_BYTES)
        reading, writing = os.pipe()
        secret = _pipe_with(word)
        try:
            with (
                open(Path(outer) / "stdin", "rb") as given,
                open(Path(outer) / "stdout", "wb") as out,
                open(Path(outer) / "stderr", "wb") as err,
            ):
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD), str(folder), "answer.py"]
                    + [str(each) for each in (writing, secret, *limits)],
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    cwd=folder,
                    env={},
                    pass_fds=(writing, secret),
                    start_new_session=True,
                )
            os.close(writing)
            writing = -1
            stopped = ""
            try:
                stopped = _wait(process, _WALL * cpu_seconds, folder)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            with os.fdopen(reading, "rb") as pipe:
                reading = -1
                said = pipe.read(4096).decode(errors="replace").splitlines()
        finally:
            for end in (reading, writing, secret):
                if end >= 0:
                    os.close(end)
        output, errors = (
            (Path(outer) / name).read_bytes()[:OUTPUT_BYTES].decode(errors="replace") for name in ("stdout", "stderr")
        )
    shut = json.loads(said[0]) if said else {}
    if said and not shut:
        raise _cannot(f"Linux {platform.release()} on {platform.machine()} without one of them")
    return Ran(
        finished=said[1:] == [word] and process.returncode == 0 and not stopped,
        output=output,
        errors=errors + (f"more than {MOST_FILES} files\n" if stopped == "files" else ""),
        timed_out=stopped == "time",
        shut=shut,
    )


def _pipe_with(text: str) -> int:
    """The end of a pipe at which `text` can be read."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:
        pipe.write(text)
    return reading


def _wait(process: subprocess.Popen[bytes], seconds: float, folder: Path) -> Literal["", "time", "files"]:
    """Wait for its end; why it has to be stopped, or was, if it did not come by itself."""
    ends = time.monotonic() + seconds
    while True:
        try:
            code_of_exit = process.wait(max(0.0, min(_LOOK_SECONDS, ends - time.monotonic())))
            return "time" if code_of_exit in (-signal.SIGXCPU, -signal.SIGKILL) else ""
        except subprocess.TimeoutExpired:
            if time.monotonic() >= ends:
                return "time"
            if _holds_too_much(folder):
                return "files"


def _holds_too_much(folder: Path) -> bool:
    try:
        return len(os.listdir(folder)) > MOST_FILES
    except OSError:  # it shut its own folder
        return True


def _cannot(system: str) -> UserError:
    return UserError(
        "code of a model is only run where it can be shut in, and that cannot be done here",
        where="the reward code and the tool python",
        got=system,
        wanted="Linux 5.13 or later on x86-64 or AArch64, with Landlock and seccomp",
        next_step="Train on such a machine, also a virtual one, or without that reward and tool: exact, numeric and "
        "regex judge answers without running them, and the tool calculator runs no code.",
    )
