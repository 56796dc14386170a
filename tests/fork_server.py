"""Runs penjing in forked children: torch is imported once, and a small training costs a second instead of three.

Reads one JSON job a line, see tests/forks.py, and answers each with {"status": exit code or minus the signal,
"seconds"}. A child differs from a process of its own in this: modules are imported already, the plan before step 1 is
made from as few timed steps as can be, and the speed of this machine's matmul was measured once, before.
"""

import atexit
import gc
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes a second

CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")
IMPORTED = (  # each child would import them anew
    "awkward",  # and the next, for tokens
    "gigatoken._tokenizer",
    "pydantic.types",  # and the next, for arguments
    "typer._adapters",
    "penjing.cli",
    "penjing.workflows.launch",
    "penjing.workflows.train",
    "penjing.rl.stage",
    "penjing.train.stages.distill",
    "penjing.train.stages.preference",
    "penjing.train.stages.next_token",
)


def count_calls(deadly, number):
    """Kill this process at its `deadly`-th call of the system that changes a file."""
    lock, counted = threading.Lock(), [0]

    def wrap(name):
        original = getattr(os, name)

        def call(*given, **named):
            changes = name != "open" or (len(given) > 1 and given[1] & (os.O_WRONLY | os.O_RDWR))
            if changes:
                with lock:
                    counted[0] += 1
                    if counted[0] == deadly:
                        os.kill(os.getpid(), number)
            return original(*given, **named)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def training(job):
    """One training, as `penjing train` does it; never returns."""
    from rich.console import Console

    from penjing.base.config import parse_overrides
    from penjing.base.errors import UserError
    from penjing.train.signals import Stopped
    from penjing.workflows.train import execute, resolve_run

    said = io.StringIO()
    code = 0
    try:
        if job.get("before"):
            exec(job["before"], {})  # noqa: S102  # a test's own lines
        if job.get("kill_at_call"):
            count_calls(job["kill_at_call"], job["signal"])
        execute(
            resolve_run(job["recipe"], parse_overrides(job["words"])),
            Console(file=said, width=200),
            job.get("allow_change", ()),
        )
    except Stopped as stopped:
        said.write(f"{stopped}\n")
        code = stopped.exit_code
    except UserError as error:
        said.write(f"{error}\n")
        code = 2
    except BaseException:
        traceback.print_exc(file=said)
        code = 1
    Path(job["log"]).write_text(said.getvalue(), encoding="utf-8")
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    os._exit(code)


def command(job, rank):
    """`penjing WORDS`; never returns. Ends as the interpreter ends a program, but without freeing what it imported."""
    from penjing.base import process_info as process
    from penjing.cli import main

    process._START_TIME = time.perf_counter()
    imported = list(weakref.finalize._registry.values())
    os.environ.update(job["environment"])
    if job["ranks"] > 1:  # as torchrun sets them
        tempfile.tempdir = os.path.dirname(job["out"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(job["ranks"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), TORCHELASTIC_RUN_ID=str(job["port"]),
        )  # fmt: skip
    if job["folder"]:
        os.chdir(job["folder"])
    sys.argv = ["penjing", *job["words"]]
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads that are no daemons
    for finalizer in imported:
        finalizer.atexit = False  # to free what torch has imported takes a child a tenth of a second
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def begin(job, rank=0):
    """Fork a child that does the job; returns its process id. In the child it ends the process."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if "recipe" in job:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        training(job)
    for stream, path in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    command(job, rank)


def is_alive(pid):
    """Whether this child runs; it is not reaped, so its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def has_content(path):
    return os.path.exists(path) and os.path.getsize(path) > 0


def wait(job, pids, began):
    """Kill where the job says so, and wait for all; the first status that is not 0."""
    if job.get("kill_after") is not None or job.get("kill_when"):
        end = began + job.get("kill_after", 240.0)
        while time.monotonic() < end and is_alive(pids[0]):
            if job.get("kill_when") and has_content(job["kill_when"]):
                break
            time.sleep(0.001)
        os.kill(pids[0], job["signal"])
    left, failed = set(pids), 0
    while left:  # as torchrun does: the first rank that fails ends the others
        for pid in [pid for pid in left if len(left) == 1 or not is_alive(pid)]:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            left.discard(pid)
            if status and not failed:
                failed = status
                for other in left:
                    os.kill(other, signal.SIGTERM)
        time.sleep(0.002)
    return failed


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def prepare():
    """What every child would do again."""
    import importlib

    from penjing.base import malloc_tuning
    from penjing.plan import hardware
    from penjing.train import step_timing

    for name in IMPORTED:
        importlib.import_module(name)
    step_timing.LEAST_STEPS, step_timing.SHORT_RUN_SHARE = 2, 0.0
    for dtype in (torch.float32, torch.bfloat16):
        hardware.peak(torch.device("cpu"), dtype)
    gc.collect()
    gc.freeze()  # else a collection in a child copies every page that the two share
    malloc_tuning.gc = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)


def main():
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is born ignoring it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one of nohup this
    prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        job = {"signal": signal.SIGKILL, "ranks": 1, **json.loads(line)}
        began = time.monotonic()
        if job["ranks"] > 1:
            job["port"] = free_port()
        pids = [begin(job, rank) for rank in range(job["ranks"])]
        answer = {"status": wait(job, pids, began), "seconds": time.monotonic() - began}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
