"""The tests' side of fork_server.py: penjing in children of one process that has imported torch already."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Finished:
    """What became of a command; the names are those of subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


class Server:
    """Commands and trainings in children of another process."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert self.process.stdout.readline().strip() == "ready"

    def run(self, recipe, words, **how):
        """A training: (exit code or minus the signal, seconds, what it said).

        kill_after: seconds, or kill_at_call: number of a call that changes a file, after which it is killed. before:
        lines of Python to run first. allow_change: fields in which it may differ.
        """
        log = self._place("log")
        answer = self._ask({"recipe": recipe, "words": list(map(str, words)), "log": str(log), **how})
        return answer["status"], answer["seconds"], _text(log)

    def command(self, *words, ranks=1, cwd=None, environment=None, **how):
        """`penjing WORDS`, on so many ranks at a time.

        kill_when: a folder or file; once it is there, and not empty, the process is sent `signal`, SIGKILL if none is
        named.
        """
        out, err = self._place("out"), self._place("err")
        job = {
            **how,
            "words": list(map(str, words)),
            "ranks": ranks,
            "folder": str(cwd or ""),
            "out": str(out),
            "err": str(err),
            "environment": {**os.environ, **ENVIRONMENT, **(environment or {})},
        }
        return Finished(self._ask(job)["status"], _text(out), _text(err))

    def _place(self, kind):
        self.jobs += 1
        return self.folder / f"{self.jobs}.{kind}"

    def _ask(self, job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def _text(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""
