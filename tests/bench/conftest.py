"""Specs to try things with, and a way to run trials without a process for each."""

import contextlib
import importlib
import io
import json
import sys
from dataclasses import asdict, replace

import pytest

from penjing.bench.meter import Spec
from penjing.bench.race import RaceSpec


@pytest.fixture
def spec():
    return Spec(
        method="dpo",
        model="m",
        data="d",
        run="r",
        stage="a:b",
        out="o",
        threads=1,
        batch=4,
        micro=2,
        steps=3,
        learning_rate=1e-3,
        clip_norm=1.0,
        betas=(0.9, 0.95),
    )


@pytest.fixture
def race_spec():
    """Of pretraining, with files that nobody reads."""
    files = dict.fromkeys(("text", "tokenizer", "run", "held_out", "rows", "out"), "unread")
    numbers = {"threads": 1, "batch": 2, "row_tokens": 8, "seconds": 10.0, "looks": 2, "steps": 3, "warmup": 1}
    optimizer = {"learning_rate": 1e-3, "clip_norm": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return RaceSpec(kind="path", device="cpu", shape={}, **files, **numbers, **optimizer)


@pytest.fixture
def in_process(monkeypatch):
    """As bench/train.py's `trial`, but in this process, which has imported most of what a trial imports."""

    def run(module, spec, folder):
        folder.mkdir(parents=True)
        file = folder / "spec.json"
        file.write_text(json.dumps(asdict(replace(spec, out=str(folder / "run")))))
        name, *words = module.split()
        monkeypatch.setattr(sys, "argv", [name, str(file), *words])
        with contextlib.suppress(ImportError):
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)  # else all share the precision of the first
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            importlib.import_module(name).main()
        return {**json.loads(said.getvalue().strip().splitlines()[-1]), "process_seconds": 1.0}

    return run
