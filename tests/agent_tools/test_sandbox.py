"""What code of a model can and cannot do."""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
import time
from pathlib import Path

import pytest
from user_errors import raises_user_error

from penjing.agent_tools import sandbox
from penjing.agent_tools.base import ToolSettings
from penjing.agent_tools.python import Python
from penjing.agent_tools.sandbox import run
from penjing.agent_tools.sandbox_child import ALLOWED, ARCHITECTURES, CHECKED, filter_program
from penjing.base.errors import UserError


@pytest.fixture(autouse=True)
def _shut_in():
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    try:
        run("")
    except UserError as error:
        pytest.skip(str(error))


def test_a_program_runs_with_its_input_and_the_standard_library():
    ran = run("import json, math\nprint(json.dumps([int(input()) + 1, math.floor(2.5)]))", stdin="41\n")
    assert ran.finished
    assert (ran.output, ran.errors, ran.timed_out) == ("[42, 2]\n", "", False)


def test_its_environment_is_empty_and_its_folder_is_its_own(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    ran = run("import os\nopen('x', 'w').write('1')\nprint('SECRET' in os.environ, sorted(os.listdir('.')))")
    assert ran.output == "False ['answer.py', 'x']\n"


@pytest.mark.parametrize("code", ["import os\nos.chmod('../stdout', 0)", "open('/etc/passwd')"])
def test_an_attack_that_is_refused_is_a_failed_program(code):
    ran = run(code + "\nprint('through')")
    assert not ran.finished
    assert "through" not in ran.output
    assert "PermissionError" in ran.errors


ORDINARY = {
    "threads": ("from concurrent.futures import ThreadPoolExecutor as P\nprint(sum(P(8).map(int, '123')))", "6"),
    "files": ("import os\nopen('a', 'w').write('x')\nos.replace('a', 'b')\nprint(os.listdir())\nos.remove('b')", "b"),
    "temporary files": ("import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: print('made')", "made"),
    "a copy": ("import shutil\nopen('a', 'w').write('x' * 9)\nshutil.copyfile('a', 'b')\nprint(open('b').read())", "x"),
    "a database": (
        "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table t(a)')\nprint('made')",
        "made",
    ),
    "modes of new files": ("import os\nos.umask(0o77)\nopen('a', 'w')\nprint(oct(os.stat('a').st_mode))", "0o100600"),
    "memory that is mapped": ("import mmap\nm = mmap.mmap(-1, 9)\nm[:2] = b'ab'\nprint(m[:2])", "ab"),
    "every module of C": (
        "import importlib, os, sys\nfrom importlib.machinery import EXTENSION_SUFFIXES as ends\n"
        "for folder in filter(os.path.isdir, sys.path):\n"
        "    for name in os.listdir(folder):\n"
        "        if name.endswith(tuple(ends)) and not name.startswith(('_tkinter', '_test', '_xx', 'xx')):\n"
        "            importlib.import_module(name.split('.')[0])\nprint('all')",
        "all",
    ),
    "archives": ("import zipfile\nz = zipfile.ZipFile('a.zip', 'w')\nz.writestr('x', 'y')\nprint(z.namelist())", "x"),
    "alarms": ("import signal, time\nsignal.signal(14, print)\nsignal.setitimer(0, .01)\ntime.sleep(.05)", "14"),
    "signals to itself": ("import signal\nsignal.signal(10, print)\nsignal.raise_signal(10)", "10"),
    "time zones": (
        "import datetime as d, zoneinfo\nprint(d.datetime(2020, 1, 1, tzinfo=d.timezone.utc))",
        "2020-01-01",
    ),
    "hashes": (
        "import hashlib, secrets, uuid, random\nprint(hashlib.sha256(b'').hexdigest(), uuid.uuid4())",
        "e3b0c442",
    ),
    "most modules": (
        "import abc, argparse, array, ast, asyncio, base64, bisect, bz2, calendar, collections, contextlib, copy, "
        "csv, ctypes, dataclasses, decimal, difflib, email, enum, fractions, functools, glob, gzip, heapq, html, http, "
        "inspect, io, itertools, json, logging, lzma, math, multiprocessing, operator, pathlib, pickle, platform, "
        "pprint, queue, re, resource, select, selectors, shutil, socket, ssl, statistics, string, struct, subprocess, "
        "sys, textwrap, threading, timeit, traceback, types, typing, unicodedata, unittest, urllib.request, uuid, "
        "weakref, xml.etree.ElementTree, zlib\nprint(resource.getrlimit(7), re.sub('a', 'b', 'a'))",
        "(64, 64) b",
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_run(name):
    code, printed = ORDINARY[name]
    ran = run(code)
    assert ran.errors == ""
    assert ran.finished
    assert printed in ran.output


def test_files_outside_are_neither_read_nor_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    os.chmod(secret, 0o666)
    ran = run(
        f"for mode in 'rwa':\n try:\n  open({str(secret)!r}, mode); print('opened')\n except OSError: pass\n"
        f"import os\ntry:\n os.unlink({str(secret)!r})\nexcept OSError: pass"
    )
    assert ran.finished
    assert ran.output == ""
    assert secret.read_text() == "42"
    assert not run(f"open({str(Path(__file__))!r})").finished


SLEEPER = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(60)", SLEEPER])
def test_time_is_short(code):
    start = time.monotonic()
    ran = run(code, cpu_seconds=0.4)
    assert ran.timed_out
    assert not ran.finished
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit", "1 / 0"])
def test_leaving_early_is_not_finishing(code):
    assert not run(code).finished


FORGERIES = {
    "writing to whatever is open": r"""
import os
for f in range(3, 1024):
    try: os.write(f, b'"done"\n')
    except OSError: pass
os._exit(0)
""",
    "what it was started with": r"""
import os, sys
for word in [*sys.argv, *sys.orig_argv]:
    if word.isdigit() and int(word) > 2:
        os.write(int(word), b'"done"\n')
        os._exit(0)
1 / 0
""",
    "what its caller knows": r"""
import gc, os, re, sys
found, frame = [], sys._getframe()
while frame:
    found += [*frame.f_locals.values(), *frame.f_globals.values(), *gc.get_referents(frame)]
    frame = frame.f_back
for each in gc.get_objects():
    found += gc.get_referents(each)
words = [each.decode("latin-1") if isinstance(each, bytes) else each for each in found]
print("found", [word for word in words if isinstance(word, str) and re.fullmatch("[0-9a-f]{32}", word)], flush=True)
os._exit(0)
""",
    "teaching runpy to swallow the exit": r"""
import runpy
runpy._ModifiedArgv0.__exit__.__code__ = (lambda self, *error: True).__code__
raise SystemExit
""",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES.keys())
def test_finishing_is_not_forged(code):
    ran = run(code)
    assert not ran.finished
    assert ran.output in ("", "found []\n")


def test_it_may_not_fill_the_disk():
    """Each file is short, and a program that makes very many is ended; the run goes on whatever it left."""
    ran = run("import time\nfor n in range(300):\n    open(str(n), 'w').close()\ntime.sleep(60)")
    assert not ran.finished
    assert not ran.timed_out
    assert ran.errors.endswith("more than 256 files\n")
    assert run("for n in range(100):\n    open(str(n), 'w').close()").finished
    assert "PermissionError" in run("import os\nos.mkdir('x')").errors


def test_it_may_not_make_many_threads():
    many = """
import threading, time
threading.stack_size(65536)
for n in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)"""
    ran = run(many)
    assert not ran.finished
    assert not ran.timed_out
    assert ran.errors.endswith("more than 64 threads\n")


def test_output_that_cannot_be_read_is_a_failed_program(monkeypatch):
    """It shares the open file: with O_DIRECT on it, some file systems refuse to be read."""

    def refuse(*arguments):
        raise OSError

    monkeypatch.setattr(sandbox.os, "pread", refuse)
    ran = run("print(1)")
    assert not ran.finished
    assert ran.output == ""


def test_where_it_cannot_be_shut_in_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with raises_user_error(where="the reward code and the tool python", got="macOS"):
        run("print(1)")


def test_a_program_waits_for_a_process_to_be_free(monkeypatch):
    """A program beside it may have made all the threads there may be; it is ended at the next look."""
    start, tried = sandbox.subprocess.Popen, []

    def refuse_once(*arguments, **named):
        tried.append(1)
        if len(tried) == 1:
            raise BlockingIOError
        return start(*arguments, **named)

    monkeypatch.setattr(sandbox.subprocess, "Popen", refuse_once)
    assert run("print(1)").output == "1\n"
    assert len(tried) == 2


@pytest.mark.parametrize("step", ["mkdir", "write_text", "TemporaryFile", "TemporaryDirectory"])
def test_a_full_disk_ends_no_run(step, tmp_path, monkeypatch):
    """A program beside it may have filled the disk until it is ended: a try later, or else a failed program."""
    owner = Path if step in ("mkdir", "write_text") else sandbox.tempfile
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    works, tried, most = getattr(owner, step), [], 1

    def refuse(*arguments, **named):
        tried.append(1)
        if len(tried) <= most:
            raise OSError(errno.ENOSPC, "no space left")
        return works(*arguments, **named)

    monkeypatch.setattr(owner, step, refuse)
    assert run("print(input())", stdin="1").output == "1\n"
    most = len(tried) + 1000
    monkeypatch.setattr(sandbox, "_PATIENCE", 0.0)
    ran = run("print(1)")
    assert (ran.finished, ran.timed_out, ran.output) == (False, False, "")
    assert "no space left" in ran.errors
    assert list(tmp_path.iterdir()) == []
    with raises_user_error(where="the reward code and the tool python", got="no space left"):
        sandbox.check_sandbox(ran)


def test_where_not_even_an_empty_program_runs_the_tool_is_refused():
    with raises_user_error(where="the reward code and the tool python", next_step="more memory"):
        Python(ToolSettings(mebibytes=8))


@pytest.mark.parametrize("text", ["print('\ud800')", "\ud800", "\0", "(" * 100_000])
def test_a_text_that_is_no_program_is_a_failed_program(text):
    assert not run(text, stdin="\ud800").finished


PID = 4242


def decide(machine, number, *arguments, architecture=None):
    """What the filter does with a call: a machine for the instructions of classic BPF, written down once more."""
    data = struct.pack("=iIQ6Q", number - (1 << 32) * (number >> 31), architecture or ARCHITECTURES[machine][1], 0,
                       *(each & (1 << 64) - 1 for each in (*arguments, *[0] * 6)[:6]))  # fmt: skip
    program, place, accumulator = filter_program(machine, PID), 0, 0
    while True:
        code, if_true, if_false, value = program[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill", 0x50001: "EPERM", 0x50026: "ENOSYS"}[value]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_its_list_and_nothing_else(machine):
    column = ARCHITECTURES[machine][0]
    listed = {numbers[column] for numbers in ALLOWED.values()} - {-1}
    checked = {numbers[column] for numbers in CHECKED.values()} - {-1}
    assert not listed & checked
    for number in range(600):
        wanted = "allow" if number in listed else "ENOSYS" if number >= 424 else "EPERM"
        if number not in checked:
            assert decide(machine, number) == wanted, number
    other = ARCHITECTURES["aarch64" if machine == "x86_64" else "x86_64"][1]
    for architecture in (other, 0x40000003, 0x40000028):  # the other, i386, 32-bit ARM
        assert decide(machine, ALLOWED["read"][column], architecture=architecture) == "kill"
    for number in (0x40000000, 0x40000000 | 512, 0xFFFFFFFF):
        assert decide(machine, number) == "kill"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_looks_at_arguments(machine):
    def of(name, *arguments):
        return decide(machine, CHECKED[name][ARCHITECTURES[machine][0]], *arguments)

    threads = {"glibc": 0x003D0F00, "musl": 0x007D0F00}
    assert {name: of("clone", flags) for name, flags in threads.items()} == {"glibc": "allow", "musl": "allow"}
    without_shared_files = 0x003D0F00 & ~0x400
    for flags in (
        17,
        0,
        0x4111,
        without_shared_files,
        0x003D0F00 | 0x10000000,
        0x003D0F00 | 0x00020000,
        0x003D0F00 | 0x2000,
    ):
        assert of("clone", flags) == "EPERM"
    assert of("kill", PID) == of("tgkill", PID, 1) == "allow"
    for pid in (0, 1, PID + 1, -1, -PID):
        assert of("kill", pid, 9) == of("tgkill", pid, pid, 9) == "EPERM"
    assert of("prlimit64", 0, 7, 0, 1 << 40) == "allow"
    for arguments in ((PID + 1, 7, 0, 1), (0, 7, 8, 0), (0, 7, 1 << 32, 0)):
        assert of("prlimit64", *arguments) == "EPERM"
    assert of("fcntl", 0, 2, 1) == of("fcntl", 0, 1030) == "allow"
    for command in (8, 10, 15, 1024, 1026, 1031, 1033):  # owners and signals, leases, notices, sizes of pipes, seals
        assert of("fcntl", 0, command) == "EPERM"
    assert of("ioctl", 1, 0x5401) == "allow"
    for request in (0x5412, 0x541C, 0x8901, 0x40086602):  # TIOCSTI, TIOCLINUX, FIOSETOWN, FS_IOC_SETFLAGS
        assert of("ioctl", 1, request) == "EPERM"
    assert of("prctl", 15) == "allow"
    assert of("prctl", 4) == of("prctl", 22) == of("prctl", 0x59616D61) == "EPERM"
    assert of("mmap", 0, 4096, 3, 0x22, 1 << 32) == of("mmap", 0, 4096, 3, 0x21, -1) == "allow"
    for flags in (1, 2, 0x12, 0x802, 0x22 << 32):  # a file: shared, private, at an address, as a library is loaded
        assert of("mmap", 0, 4096, 1, flags, 5) == "EPERM"
    opened = "open" if machine == "x86_64" else "openat"
    for name, before in ((opened, [0] if opened == "open" else [0, 0]), ("openat", [0, 0])):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR | os.O_TRUNC, os.O_RDWR):
            assert of(name, *before, flags) == "allow"
        for flags in (os.O_TRUNC, 3, 3 | os.O_TRUNC, os.O_TRUNC | os.O_CREAT, os.O_TRUNC | os.O_CLOEXEC):
            assert of(name, *before, flags) == "EPERM"


HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_calls_are_those_of_the_kernel(machine):
    header = next((Path(path) for path in HEADERS[machine] if Path(path).exists()), None)
    if header is None:
        pytest.skip(f"the kernel's headers are not installed: {HEADERS[machine][0]}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name.removeprefix("3264_"): int(number) for name, number in found}
    numbers["newfstatat"] = numbers.get("newfstatat", numbers.get("fstatat"))
    column = ARCHITECTURES[machine][0]
    for name, ours in {**ALLOWED, **CHECKED}.items():
        assert numbers.get(name, -1) == ours[column], name


def test_other_processors_have_no_filter():
    with pytest.raises(KeyError):
        filter_program("riscv64", PID)
