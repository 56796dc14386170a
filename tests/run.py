"""The whole test suite as `make test` runs it: three processes with one torch thread each, coverage reported.

One thread per process: two torch threads on a busy two-core machine are up to ten times slower than one. Three
processes: some tests wait for others to end. Files go to them whole, those of tests/conftest.py's `FIRST` first.
"""

import os
import subprocess
import sys

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}
COMMAND = [
    sys.executable,
    "-m",
    "pytest",
    "-n",
    "3",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
    "--cov",
    "--cov-report=term",
    "-q",
]

if __name__ == "__main__":
    sys.exit(subprocess.call([*COMMAND, *sys.argv[1:]], env={**os.environ, **ENVIRONMENT}))
