"""CONTRIBUTING.md: an objective with its stage is two files and a line in a table. They are written and used here."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

import penjing.objective
from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.commands.inspection import show
from penjing.plan.memory import Target
from penjing.planner.inputs import PlanOptions
from penjing.planner.report import make_report
from penjing.train import stages
from penjing.train.memory_trace.trace import predict_memory
from penjing.workflows.train import execute, plan_only, resolve_run

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
CARD = Target(name="A100", capability=(8, 0), memory_bytes=40 << 30)


@pytest.fixture(scope="module")
def objective(tmp_path_factory):
    """The page's two files and its line, each where the page says it goes."""
    folder = tmp_path_factory.mktemp("contributed")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.partition("## Add a device")[0], flags=re.MULTILINE | re.DOTALL)
    loss, stage, line = blocks
    patch = pytest.MonkeyPatch()
    for package, text in ((penjing.objective, loss), (stages, stage)):
        place = folder / package.__name__
        place.mkdir()
        (place / "smoothed.py").write_text(text, encoding="utf-8")
        patch.setattr(package, "__path__", [*package.__path__, str(place)])
    patch.setattr(stages, "STAGES", {**stages.STAGES, **ast.literal_eval("{" + line.strip() + "}")})
    yield
    patch.undo()
    for name in ("penjing.objective.smoothed", "penjing.train.stages.smoothed"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def words(objective, small_run, tmp_path_factory):
    """Settings of a run with it, on a text of its own."""
    text = tmp_path_factory.mktemp("text") / "lines.txt"
    text.write_text("".join(f"line {number} of a text that counts up to {number + 1}\n" for number in range(300)))
    kept = [word for word in small_run if not word.startswith(("data.train", "max_steps", "checkpoint"))]
    return [
        *kept,
        "objective=smoothed",
        f"data.train={text}",
        "max_steps=6",
        "checkpoint.every=2",
        "checkpoint.keep_last=9",
    ]


def run_of(words, *more):
    return resolve_run("pretrain", parse_overrides([*words, *more]))


def train(words, folder):
    said = io.StringIO()
    execute(run_of(words, f"out={folder}"), Console(file=said, width=200))
    return said.getvalue(), json.loads((folder / "outcome.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, *train(words, folder)


def test_it_is_trained(trained):
    folder, _, outcome = trained
    losses = [json.loads(line).get("loss") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1
    assert outcome["val_loss"] < losses[0]


def test_interrupted_and_resumed_it_learns_the_same_bits(trained, words, tmp_path):
    _, _, whole = trained
    cut = tmp_path / "cut"
    train(words, cut)
    for step in (4, 6):
        shutil.rmtree(cut / "checkpoints" / f"step-{step:08d}")
    (cut / "outcome.json").unlink()
    said, outcome = train(words, cut)
    assert "continues after step 2" in said
    assert (outcome["resumed"], outcome["weights_sha256"]) == (1, whole["weights_sha256"])


def test_it_is_probed_before_the_first_step(trained, words):
    folder, said, _ = trained
    known = json.loads((folder / "plan.json").read_text())
    assert known["step_seconds"] > 0 and "lines" in said
    bill = plan_only(run_of(words), Console(file=io.StringIO()))
    assert (bill.steps, bill.rows_per_step, bill.rows_per_epoch) == (6, 8, 270)


def test_it_is_planned_from_its_settings(words):
    page = make_report("pretrain", run_of(words), PlanOptions(gpu="A100"))
    assert (page.steps, page.tokens) == (6, 6 * 8 * 64)
    assert page.fits and page.step_seconds > 0


def test_its_memory_is_traced(words):
    """The whole logits, which the fused loss of the next-token objective never holds."""
    smoothed, plain = (predict_memory(run_of(words, f"objective={name}"), CARD) for name in ("smoothed", "next_token"))
    logits = 8 * 64 * 400 * torch.float32.itemsize
    assert smoothed.peak_allocated_bytes > plain.peak_allocated_bytes + logits


def test_it_is_shown(trained, words, capsys):
    show("pretrain", [*words, "objective.label_smoothing=0.2"])
    objective = tomllib.loads(capsys.readouterr().out)["objective"]
    assert objective == {"name": "smoothed", "label_smoothing": 0.2}
    show(str(trained[0]))
    assert trained[2]["weights_sha256"] in capsys.readouterr().out


def test_its_settings_are_checked_like_any(words):
    with pytest.raises(UserError) as error:
        run_of(words, "objective.label_smothing=0.2")
    assert "objective.label_smoothing" in str(error.value)
    with pytest.raises(UserError) as error:
        run_of(words, "objective=smothed")
    assert "smoothed" in str(error.value)
