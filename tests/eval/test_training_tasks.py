"""`eval.tasks`: scores at each validation of a run, without a change of what is learned."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from penjing.base.errors import UserError
from penjing.cli import app
from penjing.eval.minimal_pairs import Blimp
from penjing.eval.scorer import accuracy, grade
from penjing.eval.training_tasks import TrainingTasks
from penjing.parallel.single import Single
from penjing.train.config import EvalSettings, Run
from penjing.train.load_model import load_trained

PAIRS = [{"good": f"{word} sat on the mat.", "bad": f"{word} on sat mat the.", "uid": word} for word in "ABCDEFGHIJKL"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "blimp.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return folder


def train(out, *words):
    done = CliRunner().invoke(app, ["train", "pretrain", *words, "max_steps=4", "eval.every=2", f"out={out}"])
    assert done.exit_code == 0, done.output
    return done.output, json.loads((out / "outcome.json").read_text())


def test_scores_are_in_metrics_and_outcome_and_weights_are_the_same(tmp_path, small_run, data):
    asked = ("eval.tasks=blimp", f"eval.data={data}", "eval.limit=0", "eval.at_start=true")
    output, outcome = train(tmp_path / "asked", *small_run, *asked)
    _, without = train(tmp_path / "without", *small_run)
    assert outcome["weights_sha256"] == without["weights_sha256"]
    rows = [json.loads(line) for line in (tmp_path / "asked/metrics.jsonl").read_text().splitlines()]
    scores = {row["step"]: row["val_acc_blimp"] for row in rows if "val_acc_blimp" in row}
    assert list(scores) == [0, 2, 4]
    trained = load_trained(tmp_path / "asked")
    task = Blimp(data)
    by_itself = accuracy(grade(task, task.requests(), trained.model, trained.tokenizer))
    assert scores[4] == outcome["val_acc_blimp"] == pytest.approx(by_itself, abs=1 / len(PAIRS))  # matmuls in bfloat16
    assert outcome["before"]["val_acc_blimp"] == scores[0]
    assert f"blimp {scores[4]:.1%}" in output and "blimp (12)" in output


def test_missing_files_are_named_before_training(tmp_path, small_run):
    words = ["train", "pretrain", *small_run, "eval.tasks=blimp", f"eval.data={tmp_path}", f"out={tmp_path / 'run'}"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError) and "blimp*.jsonl" in done.exception.line()


def tasks_of(data, limit=5):
    return TrainingTasks(Run(eval=EvalSettings(tasks=("blimp",), data=str(data), limit=limit)))


def test_less_memory_means_smaller_passes(data, monkeypatch):
    sizes = []

    def ask(task, requests, *model, batch_size):
        sizes.append(batch_size)
        if batch_size > 16:
            raise torch.OutOfMemoryError("no memory")
        return []

    monkeypatch.setattr("penjing.eval.scorer.grade", ask)
    tasks = tasks_of(data)
    for _ in range(2):
        tasks(None, None, Single(torch.device("cpu")))
    assert sizes == [64, 32, 16, 16]


def test_nan_gives_no_score_and_training_goes_on(data):
    from small_models import small_model

    from penjing.data.tokenizer.train import train_tokenizer

    tokenizer = train_tokenizer([pair["good"] for pair in PAIRS] * 10, 270)
    model = small_model(vocab_size=tokenizer.size)
    strategy = Single(torch.device("cpu"))
    assert tasks_of(data)(model, tokenizer, strategy).keys() == {"val_acc_blimp"}
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    with pytest.warns(UserWarning, match="blimp has no score"):
        assert tasks_of(data)(model, tokenizer, strategy) == {}
