"""Runs trainings in forked children and kills them: torch is imported once, and a trial costs a second.

Reads one JSON job a line: {"recipe", "words", "log", "kill_after": seconds or null, "kill_at_call": number or null,
"signal": number,
"before": lines of Python to run first}. Answers each with {"status": exit code or minus the signal, "seconds"}.
"""

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes a second

CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


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


def child(job):
    """One training, as `penjing train` does it; never returns."""
    from rich.console import Console

    from penjing.base.config import parse_overrides
    from penjing.base.errors import UserError
    from penjing.recipes.execute import execute, resolve_run
    from penjing.train.signals import Stopped

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
        import traceback

        traceback.print_exc(file=said)
        code = 1
    Path(job["log"]).write_text(said.getvalue(), encoding="utf-8")
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    os._exit(code)


def quick_plans():
    """The time a run takes is not of interest here: plans are made from as few timed steps as can be."""
    from penjing.train import probe

    probe.LEAST_STEPS = probe.ALWAYS_ALLOWED = 2
    probe.PROBE_SECONDS = probe.MOST_SECONDS = 0.0


def main():
    torch.set_num_threads(1)
    import penjing.recipes.execute
    import penjing.rl.stage
    import penjing.train.distill
    import penjing.train.preference
    import penjing.train.tokens  # noqa: F401  # each child would import them anew

    quick_plans()
    print("ready", flush=True)
    for line in sys.stdin:
        job = {"signal": signal.SIGKILL, **json.loads(line)}
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            child(job)
        if job.get("kill_after") is not None:
            end = began + job["kill_after"]
            while time.monotonic() < end and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                time.sleep(0.001)
            os.kill(pid, job["signal"])  # not reaped yet, so the number is still its own
        _, status = os.waitpid(pid, 0)
        answer = {"status": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
