"""What code of a model can and cannot do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from penjing.base.errors import UserError
from penjing.tools import sandbox
from penjing.tools.sandbox import run
from penjing.tools.sandbox_child import DENIED, filter_program


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
    assert ran.shut["files"] == "landlock"
    assert "filter" in ran.shut["network"]


def test_its_environment_is_empty_and_its_folder_is_its_own(monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    ran = run("import os\nopen('x', 'w').write('1')\nprint('SECRET' in os.environ, sorted(os.listdir('.')))")
    assert ran.output == "False ['answer.py', 'x']\n"


REFUSED = {
    "a socket": "import socket\nsocket.socket()",
    "a local socket": "import socket\nsocket.socketpair()",
    "an address": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1', timeout=1)",
    "killing its parent": "import os\nos.kill(os.getppid(), 0)",
    "killing a group": "import os\nos.killpg(os.getpgid(os.getppid()), 0)",
    "a new process": "import os\nos.fork()",
    "a new program": "import os\nos.execv('/bin/sh', ['sh'])",
    "a child": "import subprocess\nsubprocess.run(['true'], check=True)",
    "leaving its group": "import os\nos.setsid()",
    "more memory for itself": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "reading the system": "open('/etc/passwd')",
    "listing the root": "import os\nos.listdir('/')",
    "reading other processes": "open('/proc/1/environ')",
    "much memory": "bytearray(2 << 30)",
    "a large file": "open('x', 'wb').write(bytes(8 << 20))",
}


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(code):
    ran = run(code + "\nprint('through')")
    assert not ran.finished
    assert "through" not in ran.output
    assert "Error" in ran.errors


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


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(60)"])
def test_time_is_short(code):
    start = time.monotonic()
    ran = run(code, cpu_seconds=0.4)
    assert ran.timed_out
    assert not ran.finished
    assert time.monotonic() - start < 30


def test_threads_may_be_made_and_end_with_it():
    code = "import threading\nt = threading.Thread(target=print, args=('in a thread',))\nt.start()\nt.join()"
    assert run(code).output == "in a thread\n"
    assert run(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", cpu_seconds=0.5
    ).timed_out


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


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    run("open('x', 'w').write('1')")
    assert list(tmp_path.iterdir()) == []


def test_where_it_cannot_be_shut_in_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"cannot be done here; got macOS; wanted Linux .* Landlock .*\. Train on such"):
        run("print(1)")


def test_the_filter_has_one_refusal_for_each_call():
    for machine, column in (("x86_64", 0), ("aarch64", 1)):
        numbers = [each[column] for each in DENIED.values() if each[column]]
        assert len(set(numbers)) == len(numbers)
        assert len(filter_program(machine)) // 8 >= 2 * len(numbers)
    with pytest.raises(KeyError):
        filter_program("riscv64")
