"""A disk that refuses and a tracker that hangs: training goes on, and ends in the same bits."""

import errno
import os
import threading
import time
import warnings

import pytest
import torch
from reliability_harness import state_of
from small_models import make_checkpointer

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.base.untrusted import read_lines
from penjing.checkpoint.background import Background, snapshot
from penjing.checkpoint.load import newest
from penjing.track.background import BackgroundTrackers, Delays
from penjing.track.base import Tracker, Trackers
from penjing.track.jsonl import JsonLines, RunFiles
from penjing.train import checkpointer as saving

# --- in the middle of a run ------------------------------------------------------------------------------------------

REFUSING = """
import errno, os
from penjing.base.files import disk_error
from penjing.checkpoint.save import save as real
calls = [0]
def save(folder, step, **rest):
    calls[0] += 1
    if calls[0] in {refused}:
        raise disk_error(OSError(errno.{code}, os.strerror(errno.{code})), folder)
    return real(folder, step, **rest)
import penjing.train.checkpointer
penjing.train.checkpointer.save = save
"""


@pytest.mark.parametrize(
    "code", ["ENOSPC", *(pytest.param(code, marks=pytest.mark.nightly) for code in ("EROFS", "EIO"))]
)
def test_a_disk_that_refuses_for_a_while(tmp_path, server, stages, code):
    recipe, words = stages["pretrain"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert server.run(recipe, [*words, f"out={whole}"])[0] == 0
    status, _, said = server.run(recipe, [*words, f"out={folder}"], before=REFUSING.format(code=code, refused="{3, 4}"))
    assert status == 0, said
    assert state_of(folder) == state_of(whole)
    kinds = [line["kind"] for line in read_lines(folder / "incidents.jsonl")]
    assert kinds == ["checkpoint not written"] * 2


def test_a_disk_that_refuses_the_last_checkpoint_is_an_error(tmp_path, server, stages):
    recipe, words = stages["pretrain"]
    folder = tmp_path / "run"
    before = REFUSING.format(code="ENOSPC", refused="range(4, 99)")
    status, _, said = server.run(recipe, [*words, f"out={folder}"], before=before)
    assert status == 2
    assert "the disk refused the last checkpoint" in said
    status, _, said = server.run(recipe, [*words, f"out={folder}"])
    assert status == 0, said
    assert "continues after step" in said
    whole = tmp_path / "whole"
    server.run(recipe, [*words, f"out={whole}"])
    assert state_of(folder) == state_of(whole)


# --- copies and the thread -------------------------------------------------------------------------------------------


def test_a_snapshot_does_not_follow_what_is_trained_on():
    weight = torch.ones(3)
    state = {"a": weight, "b": [{"c": weight[:2]}], "n": 4}
    copied = snapshot(state)
    weight.fill_(7)
    assert copied["a"].tolist() == [1, 1, 1]
    assert copied["b"][0]["c"].tolist() == [1, 1]
    assert copied["n"] == 4


def test_one_save_at_a_time_and_errors_surface():
    worker, order = Background(), []

    def slow(name):
        def work():
            time.sleep(0.05)
            order.append(name)

        return work

    worker.start(slow("first"))
    worker.start(slow("second"))
    assert order[:1] == ["first"]  # the second began only after it
    worker.wait()
    assert order == ["first", "second"]

    def fails():
        raise UserError("the disk is full")

    worker.start(fails)
    with pytest.raises(UserError, match="disk is full"):
        worker.wait()
    worker.wait()  # said once


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """What is written is the state of the instant of the save, whatever is learned while the disk takes its time."""
    release = threading.Event()
    real = saving.save

    def slow(*given, **named):
        assert release.wait(60)
        return real(*given, **named)

    monkeypatch.setattr(saving, "save", slow)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    keeper = make_checkpointer(tmp_path, model, [optimizer])

    def learn():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    learn()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    assert keeper.save({"step": 1}, False)  # returns although nothing is on the disk
    assert newest(tmp_path) is None
    for _ in range(5):
        learn()
    release.set()
    assert keeper.wait()
    checkpoint = newest(tmp_path)
    assert all(torch.equal(value, weights[name]) for name, value in checkpoint.weights().items())
    assert torch.equal(checkpoint.optimizers()[0][0]["state"][0]["exp_avg"], moment)


def test_a_refusal_in_the_background_is_told_and_the_next_save_is_made(tmp_path, monkeypatch):
    real, refuse = saving.save, [True]

    def full(folder, step, **named):
        if refuse[0]:
            raise DiskError("cannot write: the disk is full", where=folder)
        return real(folder, step, **named)

    monkeypatch.setattr(saving, "save", full)
    incidents = []
    keeper = make_checkpointer(tmp_path, torch.nn.Linear(2, 2), record=incidents.append)
    assert keeper.save({"step": 1}, False)
    refuse[0] = False
    with pytest.warns(UserWarning, match="no checkpoint of step 1"):
        assert keeper.save({"step": 2}, True)
    assert newest(tmp_path).step == 2
    assert [(each["step"], each["kind"]) for each in incidents] == [(1, "checkpoint not written")]
    refuse[0] = True
    with pytest.warns(UserWarning, match="no checkpoint of step 3"):
        assert not keeper.save({"step": 3}, True)


# --- trackers --------------------------------------------------------------------------------------------------------


class Remote(Tracker):
    """A tracker that raises or hangs at some call. `seen` has the logged steps, and of a roll-back its step as text."""

    def __init__(self, how="", at=2):
        self.how, self.at, self.seen, self.closed = how, at, [], False
        self.release = threading.Event()

    def log(self, step, figures):
        self.seen.append(step)
        if len(self.seen) >= self.at:
            if self.how == "raises":
                raise RuntimeError("500 from the server")
            if self.how == "exits":
                raise SystemExit(1)
            if self.how == "hangs":
                self.release.wait(60)

    def rewind(self, step):
        self.seen.append(str(step))

    def end(self):
        self.closed = True


def test_good_trackers_get_everything_in_order():
    remotes = {"one": Remote(), "other": Remote()}
    tracker = BackgroundTrackers({name: lambda remote=remote: remote for name, remote in remotes.items()})
    trackers = Trackers([tracker])
    for step in range(50):
        trackers.log(step, {"loss": 1.0})
    trackers.rewind(20)
    trackers.log(21, {})
    trackers.end()
    for remote in remotes.values():
        assert remote.seen == [*range(50), "20", 21]
        assert remote.closed


def test_a_roll_back_reaches_a_tracker_that_has_fallen_behind():
    remote = Remote("hangs", at=1)
    tracker = BackgroundTrackers({"remote": lambda: remote})
    for step in range(1000):
        tracker.log(step, {})
    while remote.seen == []:
        time.sleep(0.01)
    tracker.log(1000, {})
    with pytest.warns(UserWarning, match="dropped"):
        tracker.log(1001, {})
    tracker.rewind(7)
    remote.how = ""
    remote.release.set()
    tracker.end()
    assert remote.seen[-1] == "7" and remote.closed


@pytest.mark.parametrize("how", ["raises", "exits", "hangs"])
def test_a_bad_tracker_is_a_warning(how):
    remote = Remote(how)
    tracker = BackgroundTrackers({"remote": lambda: remote}, Delays(end=0.2))
    trackers = Trackers([tracker])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(1500):  # more than may wait
            trackers.log(step, {"loss": 1.0})
            if step == 5:
                time.sleep(0.1)
        trackers.end()
    assert said, "somebody has to be told"
    assert len(said) <= 3
    remote.release.set()


def test_trackers_that_never_begin_hold_up_the_run_for_one_wait_at_each_end():
    release, good = threading.Event(), Remote()

    def make():
        release.wait(600)
        return Remote()

    before = time.monotonic()
    tracker = BackgroundTrackers(
        {**{f"dead {number}": make for number in range(30)}, "good": lambda: good}, Delays(start=1, end=1)
    )
    tracker.log(1, {})
    with pytest.warns(UserWarning, match="abandoned") as said:
        tracker.end()
    assert len(said) == 30
    assert time.monotonic() - before < 30  # not 60, even on a busy machine
    assert good.seen == [1] and good.closed
    release.set()


def test_a_tracker_that_is_not_installed_is_an_error_at_once():
    def make():
        raise UserError("wandb is not installed")

    with pytest.raises(UserError, match="not installed"):
        BackgroundTrackers({"good": Remote, "wandb": make})


def test_lines_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, resume_step=0)
    lines.log(1, {"loss": 1.0})
    real = JsonLines._write

    def full(self):
        with open(self.path, "ab") as stream:
            stream.write(self._pending[0][:5])  # half a line is on the disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(JsonLines, "_write", full)
    with pytest.warns(UserWarning, match="wait"):
        lines.log(2, {"loss": 2.0})
    lines.log(3, {"loss": 3.0})
    monkeypatch.setattr(JsonLines, "_write", real)
    lines.log(4, {"loss": 4.0})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]


def test_an_incident_that_the_disk_refused_is_written_at_the_end(tmp_path):
    files = RunFiles(*(tmp_path / name for name in ("metrics", "samples", "incidents")), resume_step=0)
    (tmp_path / "incidents").mkdir()  # in the way
    with pytest.warns(UserWarning, match="its lines wait"):
        files.incident({"step": 3, "kind": "checkpoint not written"})
    (tmp_path / "incidents").rmdir()
    files.end()
    assert read_lines(tmp_path / "incidents") == [{"step": 3, "kind": "checkpoint not written"}]
    assert not (tmp_path / "samples").exists()


def test_going_back_takes_later_lines_out(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl", resume_step=0)
    for step in range(1, 6):
        lines.log(step, {})
    Trackers([lines]).rewind(3)
    lines.log(4, {"again": 1})
    assert [(line["step"], "again" in line) for line in read_lines(tmp_path / "metrics.jsonl")] == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]


@pytest.mark.parametrize("last", ["log", "end"])
def test_going_back_while_the_disk_refuses_is_made_up_for(tmp_path, monkeypatch, last):
    import penjing.track.jsonl as jsonl

    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, resume_step=0)
    trackers = Trackers([lines])
    for step in range(1, 6):
        trackers.log(step, {})
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise DiskError("cannot write: the disk is full", where=path)

        patch.setattr(jsonl, "write_text", full)
        patch.setattr(jsonl, "open", full, raising=False)
        with pytest.warns(UserWarning, match="its lines wait"):
            trackers.log(6, {})
        trackers.rewind(3)
        trackers.log(4, {"again": 1})
    if last == "log":
        trackers.log(5, {"again": 1})
    trackers.end()
    again = [(4, True), (5, True)] if last == "log" else [(4, True)]
    found = [(line["step"], "again" in line) for line in read_lines(path)]
    assert found == [(1, False), (2, False), (3, False), *again]
