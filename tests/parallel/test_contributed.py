"""CONTRIBUTING.md's strategy is one file and one line; and which strategies a launch takes."""

import contributing
import pytest
from typer.testing import CliRunner

import penjing.parallel
from penjing.base.errors import UserError
from penjing.cli import app
from penjing.parallel.base import make_strategy
from penjing.parallel.single import Single


def test_its_row_trains_by_its_name(tmp_path, small_run, losses, monkeypatch):
    name = contributing.add("Add a strategy", penjing.parallel, penjing.parallel.STRATEGIES, tmp_path, monkeypatch)
    for strategy in ("auto", "single", name):
        words = [*small_run, "max_steps=2", "max_grad_norm=1e-6", f"parallel.strategy={strategy}"]
        done = CliRunner().invoke(app, ["train", "pretrain", *words, f"out={tmp_path / strategy}"])
        assert done.exit_code == 0, done.output
    by_norm, by_value = losses(tmp_path / "single"), losses(tmp_path / name)
    assert by_norm == losses(tmp_path / "auto")
    assert by_norm[1] == by_value[1]
    assert by_norm[2] != by_value[2]


@pytest.mark.parametrize(
    ("name", "world", "says"), [("dpp", 1, "mean ddp"), ("ddp", 1, "torchrun"), ("single", 2, "one process")]
)
def test_a_strategy_that_cannot_run_is_refused(name, world, says, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(UserError, match=says):
        make_strategy("cpu", name)


def test_auto_is_one_process_without_torchrun():
    assert isinstance(make_strategy("cpu"), Single)
