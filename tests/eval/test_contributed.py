"""CONTRIBUTING.md's eval task is one file and one line; `penjing eval --tasks` finds it by its name."""

import contributing
import pytest
from typer.testing import CliRunner

import penjing.eval
from penjing.base.errors import UserError
from penjing.cli import app
from penjing.eval.task import Task


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_run):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    done = CliRunner().invoke(app, ["train", "pretrain", *small_run, "max_steps=2", f"out={folder}"])
    assert done.exit_code == 0, done.output
    return folder


def evaluate(run, *words):
    return CliRunner().invoke(app, ["eval", str(run), *words])


def test_its_row_is_scored_by_its_name(run, tmp_path, monkeypatch):
    name = contributing.add("Add an eval task", penjing.eval, penjing.eval.TASKS, tmp_path, monkeypatch)
    monkeypatch.setattr(Task, "figures", lambda task, graded: {"counted": len(graded)})
    done = evaluate(run, "--tasks", name)
    assert done.exit_code == 0, done.output
    [total, *_] = [line.split() for line in done.output.splitlines() if line.split()[:1] == [name]]
    asked, _, accuracy, error, interval, chance = total[1:7]
    assert (asked, chance) == ("48", "50.0")
    low, high = map(float, interval.split("-"))
    assert low < float(accuracy) < high and 0 < float(error) < 50
    assert [line for line in done.output.splitlines() if line.split()[:1] == ["count"]]
    assert "counted 48" in done.output


@pytest.mark.parametrize(
    ("words", "told"), [((), "--tasks"), (("--tasks", "sums"), "sums"), (("--tasks", "questions"), "FILE")]
)
def test_what_is_missing_is_named_before_a_model_is_loaded(run, words, told):
    done = evaluate(run.parent / "gone", *words)
    assert isinstance(done.exception, UserError) and told in done.exception.line()
