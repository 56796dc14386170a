"""The whole test suite as `make test` runs it: three processes with one torch thread each, on a busy machine six.

One thread per process: two torch threads on a busy two-core machine are up to ten times slower than one. Three
processes: some tests wait for others to end. More processes get a larger share of what other programs leave. Each
begins with its part of the files, in order; one that has no more takes half of what another has left.
"""

import os
import subprocess
import sys
import time

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "PYTHONDONTWRITEBYTECODE": "",  # without bytecode every child of a test compiles the package anew
}
BUSY = 0.8  # share of a second of all cores that is not idle


def busy_share() -> float:
    """Of the next second; 0 where the system does not tell."""

    def ticks() -> list[int]:
        with open("/proc/stat") as stat:
            return [int(word) for word in stat.readline().split()[1:9]]

    try:
        before = ticks()
        time.sleep(1)
        spent = [after - earlier for earlier, after in zip(before, ticks(), strict=True)]
    except (OSError, ValueError):
        return 0.0
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))  # idle, and waiting for a disk


if __name__ == "__main__":
    processes = "6" if busy_share() > BUSY else "3"
    command = [sys.executable, "-m", "pytest", "-n", processes, "--dist", "worksteal", "-q", *sys.argv[1:]]
    sys.exit(subprocess.call(command, env={**os.environ, **ENVIRONMENT}))
