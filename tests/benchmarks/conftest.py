"""Specs to try things with, comparisons of pretended trials, and a way to run trials without a process for each."""

import contextlib
import importlib
import io
import json
import sys
from dataclasses import asdict, replace

import pytest
from compare import comparison, pretrain_data
from compare.comparison import Options, Prepared, TrialComparison
from compare.trial_spec import AlignmentSpec, PretrainSpec
from rich.console import Console

SHARED = {"threads": 1, "steps": 3, "warmup": 1, "learning_rate": 1e-3, "max_grad_norm": 1.0, "betas": (0.9, 0.95)}


@pytest.fixture
def quiet():
    return Console(file=io.StringIO(), width=250)


@pytest.fixture
def alignment_spec():
    files = {"model": "m", "data": "d", "run": "r", "out": "o"}
    return AlignmentSpec(setting="step", method="dpo", batch=4, micro=2, beta=0.1, **files, **SHARED)


@pytest.fixture
def spec():
    """Of pretraining, with files that nobody reads."""
    files = dict.fromkeys(("text", "tokenizer", "run", "held_out", "rows", "out"), "unread")
    path = {"setting": "path", "batch": 2, "seq_len": 8, "seconds": 10.0, "evaluations": 2, "weight_decay": 0.1}
    return PretrainSpec(shape={}, **path, **files, **SHARED)


@pytest.fixture
def tiny_quick(monkeypatch):
    """`--quick` in seconds."""
    model = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model |= {"head_dim": 16, "intermediate_size": 48, "vocab_size": 400}
    size = pretrain_data.DataSize(model=model, seq_len=64, batch=4, held_out=16)
    monkeypatch.setattr(pretrain_data, "QUICK", size)


@pytest.fixture
def installed(monkeypatch):
    """As if every package was."""
    monkeypatch.setattr(comparison.importlib.util, "find_spec", lambda name: True)


@pytest.fixture
def compare(tmp_path, quiet):
    """Run a comparison whose trials are pretended; the console's text is in `quiet.file`."""

    def run(benchmark, spec, run_trial, about=None, save=lambda record: None, earlier=None, **options):
        options = Options(**{"trials": 1, "steps": 3, "warmup": 1, "may_compile": False, **options})
        spec = replace(spec, warmup=options.warmup, steps=options.steps, seconds=options.seconds)
        prepared = Prepared(spec=spec, options=options, about=about or {}, lines=[])
        given = {"benchmark": benchmark, "prepared": prepared, "folder": tmp_path, "console": quiet}
        return TrialComparison(**given, run_trial=run_trial, save=save, earlier=earlier).run()

    return run


@pytest.fixture
def in_process(monkeypatch):
    """As `run_trial`, but in this process, which has imported most of what a trial imports."""

    def run(module, spec, folder):
        folder.mkdir(parents=True)
        file = folder / "spec.json"
        file.write_text(json.dumps(asdict(replace(spec, out=str(folder / "run")))))
        name, *words = module.split()
        monkeypatch.setattr(sys, "argv", [name, str(file), *words])
        with contextlib.suppress(ImportError):
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)  # else all share the precision of the first
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            importlib.import_module(name).main()
        return {**json.loads(printed.getvalue().strip().splitlines()[-1]), "process_seconds": 1.0}

    return run
