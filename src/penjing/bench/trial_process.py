"""A trial in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.bench.trial_spec import TrialSpec


def in_turn(names: Sequence[str], number: int) -> Sequence[str]:
    """The order of a trial: it turns round from one to the next, so that nobody always goes first."""
    return names if number % 2 == 0 else names[::-1]


def run_json(
    command: Sequence[str], *, where: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """The JSON that a command printed as its last line, with the seconds from its start to its end.

    Raises UserError with its last words if it failed, or if it took longer than `timeout` seconds.
    """
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **(environment or {})}, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"not done after {timeout:.0f} s", where=where) from None
    seconds = time.perf_counter() - began
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise UserError("a trial failed", where=where, got=last)
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "process_seconds": seconds}


def run_trial(module: str, spec: TrialSpec, folder: Path) -> dict[str, Any]:
    """Run one trial in `folder`. module: its module, and words for it after a space."""
    folder.mkdir(parents=True)
    file = folder / "spec.json"
    file.write_text(json.dumps(asdict(replace(spec, out=str(folder / "run")))), encoding="utf-8")
    # No trial finds anything compiled, except by the trial of the same number in the other setting.
    compiled = folder.parent / f"compiled-{folder.name.removeprefix('path-').removeprefix('step-')}"
    name, *words = module.split()
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        **({"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}),
    }
    return run_json([sys.executable, "-m", name, str(file), *words], where=module, environment=environment)
