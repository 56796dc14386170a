"""Run code that a model wrote: in a process that can reach nothing, for a short while, and never in this one."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from penjing.base.errors import UserError

OUTPUT_BYTES = 1 << 20  # of what it prints, and of each file it writes
MOST_FILES = 256  # in its folder; one that makes more is ended, as it would fill the disk
MOST_THREADS = 64  # one that has more at a look is ended; what it can make between two looks its limits bound
NEWEST_LANDLOCK = 1 << 16  # the newest ABI of Landlock that is used; tests take older ones
_CHILD = Path(__file__).with_name("sandbox_child.py")
_WALL = 3.0  # the clock may run this many times as long as the CPU, for a busy machine; a sleeping program ends too
_LOOK_SECONDS = 0.1  # between looks at its files and threads
START_SECONDS = 30.0  # for an empty program, by which it is seen whether there is a sandbox; also on a busy machine
_PATIENCE = 10.0  # seconds to wait for a process to be free
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program went. finished: it came to its end by itself, without an error and without an exit on the way.

    `finished` is reported by the process that ran the program. One that leaves early cannot say it by accident, nor by
    writing to whatever is open; one that takes its own interpreter apart still can. What cannot be forged is output
    that is compared with what the program has never seen.
    """

    finished: bool
    output: str
    errors: str
    timed_out: bool


def run(code: str, *, stdin: str = "", cpu_seconds: float = 5.0, memory_mebibytes: int = 512) -> SandboxResult:
    """Run Python `code` contained (see agent_tools/sandbox_child.py), and end it when the time is over.

    It has an empty environment, a folder of its own, `stdin`, the standard library, and nothing else. Whatever it does,
    also to its folder and its output, is a program that did not finish, and no error here.
    Raises UserError where the system cannot contain a program: then no code is run.
    """
    if sys.platform != "linux":
        raise _cannot({"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform))
    with contextlib.ExitStack() as stack:
        try:
            folder, files = _patiently(lambda: _prepare(stack, code, stdin), OSError)
        except OSError as error:
            return SandboxResult(
                finished=False, output="", errors=f"its folder cannot be made: {error}\n", timed_out=False
            )
        limits = (max(1, round(cpu_seconds + 0.5)), memory_mebibytes << 20, OUTPUT_BYTES)
        with _Program(folder, limits, files) as program:
            stopped = program.wait(_WALL * cpu_seconds)
        output, output_whole = _text(files[1])
        errors, errors_whole = _text(files[2])
    if program.missing:
        raise _cannot(f"Linux {platform.release()} on {platform.machine()} without {program.missing}")
    if not (output_whole and errors_whole):
        stopped = stopped or f"more than {OUTPUT_BYTES} bytes of output, or output that cannot be read"
    return SandboxResult(
        finished=program.finished and not stopped,
        output=output,
        errors=errors + (f"{stopped}\n" if stopped not in ("", "time") else ""),
        timed_out=stopped == "time",
    )


def check_sandbox(ran: SandboxResult) -> None:
    """To be called with how an empty program went. Raises UserError if it did not come to its end."""
    if not ran.finished:
        last = ran.errors.strip().splitlines()[-1:] or ["no message"]
        raise UserError(
            "not even an empty program runs in the sandbox",
            where="the reward code and the tool python",
            got="no end in time" if ran.timed_out else last[0],
            next_step="Give it more memory, or train without that reward and tool.",
        )


class _Program:
    """The process, from its start to its end: it has ended when the `with` block is left.

    Its words come through a pipe: first what this system lacks to contain it, before anything of the program runs, and
    when the program ran to its end, a word that was sent to it through another pipe.
    """

    def __init__(self, folder: Path, limits: tuple[int, int, int], files: tuple[BinaryIO, BinaryIO, BinaryIO]) -> None:
        self.folder = folder
        self.written = files[1:]
        self.missing = ""
        self._word = secrets.token_hex(16).encode()
        self._report, report = os.pipe()
        secret, self._secret = os.pipe()
        command = [sys.executable, "-I", "-S", "-X", "utf8", str(_CHILD), str(folder), "answer.py"]
        command += [str(each) for each in (report, secret, NEWEST_LANDLOCK, *limits)]
        try:
            given, out, err = files
            start = partial(
                subprocess.Popen, command, stdin=given, stdout=out, stderr=err, cwd=folder, env={},
                pass_fds=(report, secret), start_new_session=True,
            )  # fmt: skip
            self._process = _patiently(start, BlockingIOError)  # where a program beside it makes too many threads
        except BaseException:
            os.close(self._report)
            os.close(self._secret)
            raise
        finally:
            os.close(report)
            os.close(secret)
        self._reply = b""

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # with its threads; it cannot have started another process
        self._process.wait()
        os.close(self._report)
        os.close(self._secret)

    @property
    def finished(self) -> bool:
        return self._reply == self._word and self._process.returncode == 0

    def wait(self, seconds: float) -> str:
        """Wait for its end; why it has to be stopped, or was, if it did not come by itself."""
        ends = time.monotonic() + seconds
        heard = self._hear(ends)
        if not heard.endswith(b"\n"):
            return "time" if time.monotonic() >= ends else "it did not start"
        self.missing = heard.decode(errors="replace").strip()
        if self.missing:
            return self.missing
        with contextlib.suppress(BrokenPipeError):
            os.write(self._secret, self._word)
        while True:
            step = min(time.monotonic() + _LOOK_SECONDS, ends)
            self._reply = self._reply or self._hear(step)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code_of_exit = self._process.wait(max(0.0, step - time.monotonic()))
                return "time" if code_of_exit in (-signal.SIGXCPU, -signal.SIGKILL) else ""
            if time.monotonic() >= ends:
                return "time"
            if too_much := self._too_much():
                return too_much

    def _hear(self, ends: float) -> bytes:
        """The next bytes from its pipe; none if the time ends first, or it closes the pipe."""
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        return os.read(self._report, 4096) if poll.poll(max(0.0, ends - time.monotonic()) * 1000) else b""

    def _too_much(self) -> str:
        try:
            if len(os.listdir(self.folder)) > MOST_FILES:
                return f"more than {MOST_FILES} files"
        except OSError:
            return "its folder cannot be read"
        if any(os.fstat(file.fileno()).st_size >= OUTPUT_BYTES for file in self.written):
            return f"more than {OUTPUT_BYTES} bytes of output"
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{self._process.pid}/task").st_nlink - 2 > MOST_THREADS:
                return f"more than {MOST_THREADS} threads"
        return ""


def _patiently(do: Callable[[], Done], retried: type[OSError]) -> Done:
    """What a call gives, tried again for a while: what it lacks comes free once another program is ended."""
    ends = time.monotonic() + _PATIENCE
    while True:
        try:
            return do()
        except retried:
            if time.monotonic() >= ends:
                raise
            time.sleep(_LOOK_SECONDS)


def _prepare(stack: contextlib.ExitStack, code: str, stdin: str) -> tuple[Path, tuple[BinaryIO, BinaryIO, BinaryIO]]:
    """Its folder and files, removed at the end of `stack`. OSError where the disk is full."""
    with contextlib.ExitStack() as attempt:
        made = tempfile.TemporaryDirectory(prefix="penjing-sandbox-", ignore_cleanup_errors=True)
        outer = attempt.enter_context(made)
        folder = Path(outer) / "own"
        folder.mkdir(0o700)
        (folder / "answer.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        # Files without a name, which nobody can open, rename or shut.
        given, out, err = (attempt.enter_context(tempfile.TemporaryFile(dir=outer)) for _ in range(3))
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        stack.push(attempt.pop_all())
        return folder, (given, out, err)


def _text(file: BinaryIO) -> tuple[str, bool]:
    """What a program wrote, and whether that is all of it."""
    try:
        found = os.pread(file.fileno(), OUTPUT_BYTES, 0)
    except OSError:  # the program shares the open file, and can change how it is read
        return "", False
    return found.decode(errors="replace"), len(found) < OUTPUT_BYTES


def _cannot(system: str) -> UserError:
    return UserError(
        "code of a model is only run where it can be contained, and that cannot be done here",
        where="the reward code and the tool python",
        got=system,
        wanted="Linux 5.13 or later on x86-64 or AArch64, with Landlock and seccomp",
        next_step="Train on such a machine, also a virtual one, or without that reward and tool: exact, numeric and "
        "regex judge answers without running them, and the tool calculator runs no code.",
    )
