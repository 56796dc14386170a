"""Run a trial in its own process."""

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

from compare.trial_spec import TrialSpec
from penjing.base.errors import UserError


def alternate(names: Sequence[str], number: int) -> Sequence[str]:
    """The order in a round: reversed in every other round, so that no contestant always goes first."""
    return names if number % 2 == 0 else names[::-1]


def run_json(
    command: Sequence[str], *, where: str, environment: Mapping[str, str] | None = None, timeout: float | None = None
) -> dict[str, Any]:
    """The JSON in the last line of a command's output, plus its wall time in seconds.

    Raises UserError, with the last line of output, if it failed or took longer than `timeout` seconds.
    """
    began = time.perf_counter()
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **(environment or {})}, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"not done after {timeout:.0f} s", where=where) from None
    seconds = time.perf_counter() - began
    if completed.returncode:
        last = (completed.stderr.strip() or completed.stdout.strip() or "no output").splitlines()[-1]
        raise UserError("a trial failed", where=where, got=last)
    return {**json.loads(completed.stdout.strip().splitlines()[-1]), "process_seconds": seconds}


def run_trial(module: str, spec: TrialSpec, folder: Path) -> dict[str, Any]:
    """Run one trial in `folder`. module: module name, and arguments after a space."""
    folder.mkdir(parents=True)
    file = folder / "spec.json"
    file.write_text(json.dumps(asdict(replace(spec, out=str(folder / "run")))), encoding="utf-8")
    # A trial shares its compile cache only with the trial of the same number in the other setting.
    compile_cache = folder.parent / f"compiled-{folder.name.removeprefix('path-').removeprefix('step-')}"
    name, *arguments = module.split()
    scripts = str(Path(__file__).parents[1])  # where this package is found
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (scripts, os.environ.get("PYTHONPATH")))),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache),
        "TRITON_CACHE_DIR": str(compile_cache / "triton"),
        **({"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}),
    }
    return run_json([sys.executable, "-m", name, str(file), *arguments], where=module, environment=environment)
