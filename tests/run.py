"""The whole test suite as `make test` runs it: three processes with one torch thread each.

One thread per process: two torch threads on a busy two-core machine are up to ten times slower than one. Three
processes: some tests wait for others to end. Each begins with a third of the files, in order; one that has no more
takes half of what another has left.
"""

import os
import subprocess
import sys

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    "PYTHONDONTWRITEBYTECODE": "",  # without bytecode every child of a test compiles the package anew
}
COMMAND = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "worksteal", "-q"]

if __name__ == "__main__":
    sys.exit(subprocess.call([*COMMAND, *sys.argv[1:]], env={**os.environ, **ENVIRONMENT}))
