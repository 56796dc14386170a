"""CONTRIBUTING.md's tracker is one file and one line; and what a tracker hears of a run."""

import json

import contributing
from typer.testing import CliRunner

import penjing.track
from penjing.base.errors import UserError
from penjing.base.registry import look_up
from penjing.cli import app


def train(*words):
    return CliRunner().invoke(app, ["train", "pretrain", *words])


def test_its_row_logs_a_run_by_its_name(tmp_path, small_run, losses, monkeypatch):
    name = contributing.add("Add a tracker", penjing.track, penjing.track.TRACKERS, tmp_path, monkeypatch)
    assert look_up(penjing.track.TRACKERS, name, what="tracker").__module__ == f"penjing.track.{name}"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(penjing.track.TRACKERS, name, "table:Table")  # where another process finds it too
    run = tmp_path / "run"
    done = train(*small_run, "max_steps=2", f"log.trackers={name}", f"out={run}")
    assert done.exit_code == 0, done.output
    rows = [line.split(",") for line in (run / "loss.csv").read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in rows} == losses(run) and len(rows) == 2


def test_it_hears_of_samples_and_incidents_as_the_folder_does(tmp_path, small_run, monkeypatch):
    from penjing.train import loop

    monkeypatch.setitem(penjing.track.TRACKERS, "listener", "bad_trackers:Listener")
    real = loop.step

    def told(context, index):
        context.guard.record({"step": index + 1, "kind": "made up"})
        return real(context, index)

    monkeypatch.setattr(loop, "step", told)
    words = ["max_steps=2", "sample.every=2", "sample.prompts=Once", "log.trackers=listener"]
    done = train(*small_run, *words, f"out={tmp_path / 'run'}")
    assert done.exit_code == 0, done.output
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    assert heard[0] == ["start", "run", 2] and heard[-1] == ["end"]
    assert ["sample", 2, ["Once"]] in heard
    lines = [json.loads(line) for line in (tmp_path / "run/incidents.jsonl").read_text().splitlines()]
    incidents = [["incident", line["step"], line["kind"]] for line in lines]
    assert [one for one in heard if one[0] == "incident"][-len(incidents) :] == incidents


def test_an_unknown_one_is_an_error_before_the_first_step(tmp_path, small_run):
    done = train(*small_run, "log.trackers=wandbb", f"out={tmp_path / 'run'}")
    assert isinstance(done.exception, UserError)
    assert "wandb" in done.exception.line()
