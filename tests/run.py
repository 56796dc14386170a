"""The whole test suite as `make test` runs it: two processes with one torch thread each, coverage reported.

One thread per process: two torch threads on a busy two-core machine are up to ten times slower than one.
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
COMMAND = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope", "--cov", "--cov-report=term", "-q"]

if __name__ == "__main__":
    sys.exit(subprocess.call([*COMMAND, *sys.argv[1:]], env={**os.environ, **ENVIRONMENT}))
