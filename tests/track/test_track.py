"""Trackers: the curve goes on after a resume, and no tracker's trouble reaches training."""

from __future__ import annotations

import io
import json
import math
import time
import warnings

import pytest
import torch
from rich.console import Console
from short_runs import train, weights_of

import penjing.track
from penjing.base.untrusted import read_lines
from penjing.track import process
from penjing.track.background import Delays
from penjing.track.base import Trackers
from penjing.track.console import ConsoleTracker, describe
from penjing.track.jsonl import JsonLines

# --- JSON lines ------------------------------------------------------------------------------------------------------


def test_lines_after_the_resumed_step_are_removed(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    first = JsonLines(path, resume_step=0)
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": step / 2})
    first.end()
    second = JsonLines(path, resume_step=2)
    second.log(3, {"loss": 9.0})
    second.end()
    assert read_lines(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 9.0}]


def test_a_file_that_is_gone_has_no_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    JsonLines(path, resume_step=0).end()
    path.unlink()
    assert read_lines(path) == []


def test_a_fresh_start_removes_what_was_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    JsonLines(path, resume_step=0).end()
    assert path.read_text() == ""


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\x00\x00\x00", b'{"step": 3, "name": "\xe7', b"\n\n"])
def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "name": "\xe7\x9b\x86\xe2\x80\xa8"}\n{"step": 2}\n' + tail)
    expected = [{"step": 1, "name": "盆\u2028"}, {"step": 2}]
    assert read_lines(path) == expected
    tracker = JsonLines(path, resume_step=2)
    tracker.log(3, {})
    tracker.end()
    assert read_lines(path) == [*expected, {"step": 3}]


def test_what_is_no_number_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path, resume_step=0)
    tracker.log(1, {"loss": math.nan, "rate": math.inf, "norm": -math.inf, "tokens": 3, "speed": 1.5})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "rate": None,
        "norm": None,
        "tokens": 3,
        "speed": 1.5,
    }, "and it is on disk before the end"
    tracker.end()


# --- several at once -------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self, fails_on=()):
        self.seen, self.fails_on = [], fails_on

    def log(self, step, figures):
        self.seen.append(step)
        if step in self.fails_on:
            raise RuntimeError("the network is down")

    def end(self):
        self.seen.append("ended")
        if "end" in self.fails_on:
            raise RuntimeError("the network is down")


def test_a_tracker_that_fails_warns_once_and_is_left_out():
    bad, good = Recorder(fails_on=(2,)), Recorder()
    trackers = Trackers([bad, good])
    trackers.log(1, {})
    with pytest.warns(UserWarning, match="Recorder failed and is left out from here on: the network is down"):
        trackers.log(2, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log(3, {})
        trackers.end()
    assert bad.seen == [1, 2]
    assert good.seen == [1, 2, 3, "ended"]


def test_failing_to_close_is_a_warning_too():
    bad, good = Recorder(fails_on=("end",)), Recorder()
    with pytest.warns(UserWarning, match="left out"):
        Trackers([bad, good]).end()
    assert good.seen == ["ended"]


def test_a_keyboard_interrupt_is_not_a_tracker_s_trouble():
    tracker = Recorder()
    tracker.log = lambda step, figures: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        Trackers([tracker]).log(1, {})


# --- the terminal ----------------------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_lines():
    stream = io.StringIO()
    tracker = ConsoleTracker(Console(file=stream, width=200), name="pretrain", num_steps=10, start_step=0)
    tracker.log(5, {"loss": 2.5, "learning_rate": 5e-4, "seconds_left": 61.0})
    tracker.log(10, {"val_loss": 2.25})
    tracker.end()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("  pretrain step 5/10: loss 2.500  lr 5.0e-04, ")
    assert first.endswith(" left")
    assert second == "  pretrain step 10/10: held-out loss 2.250"


def test_the_loss_of_a_reward_model_is_shown():
    assert describe({"val_ranking_loss": 0.5, "val_reward_accuracy": 0.75}) == "held-out loss 0.500  accuracy 75.0%"


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True)
    tracker = ConsoleTracker(console, name="sft", num_steps=4, start_step=1)
    tracker.log(4, {"loss": 2.5})
    tracker.end()
    assert "loss 2.500" in stream.getvalue()
    assert "100%" in stream.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_a_name_is_never_markup(live):
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=live, color_system=None)
    tracker = ConsoleTracker(console, name="my [dim] [/stage]", num_steps=4, start_step=1)
    tracker.log(4, {"val_loss": 2.5})
    tracker.log(4, {"loss": 2.5})
    tracker.end()
    assert "my [dim] [/stage] step 4/4: held-out loss 2.500" in stream.getvalue()


def test_the_bar_goes_back_with_the_run():
    stream = io.StringIO()
    tracker = ConsoleTracker(
        Console(file=stream, width=120, force_terminal=True), name="sft", num_steps=4, start_step=0
    )
    tracker.log(4, {"loss": 2.5})
    Trackers([tracker]).rewind(2)
    tracker.end()
    assert stream.getvalue().rindex(" 50%") > stream.getvalue().find("100%")


def test_what_is_absent_is_left_out():
    assert describe({}) == ""
    assert "2" in describe({"skipped_steps": 2})
    assert describe({"mfu": 0.0}) == ""
    text = describe({"mfu": 0.42, "tokens_per_second": 12_000, "memory_bytes": 2**30, "val_bits_per_byte": 1.0})
    assert "MFU 42%" in text
    assert "tok/s" in text
    assert "1.000 bits per byte" in text
    assert "GiB" in text


def test_trackers_that_hang_or_raise_change_no_weight(tmp_path, small_run, monkeypatch):
    """One hangs for a minute at its start, one at its metrics, one raises: the weights are those without trackers."""
    monkeypatch.setattr(process, "DELAYS", Delays(start=0.2, end=0.2))
    for how in ("hang_at_start", "hang_at_log", "raise_at_log", "raise_at_summary"):
        monkeypatch.setitem(penjing.track.TRACKERS, how, f"bad_trackers:{how.title().replace('_', '')}")
    words = [*small_run, "max_steps=4", "eval.every=0"]
    train("pretrain", *words, f"out={tmp_path / 'alone'}")
    names = "hang_at_start,hang_at_log,raise_at_log,raise_at_summary"
    began = time.monotonic()
    with pytest.warns(UserWarning, match="left out") as told:
        train("pretrain", *words, f"log.trackers={names}", f"out={tmp_path / 'tracked'}")
    assert time.monotonic() - began < 45, "nobody waited for the minute to be over"
    said = " ".join(str(one.message) for one in told)
    assert all(name in said for name in names.split(","))
    alone, tracked = (weights_of(tmp_path / name) for name in ("alone", "tracked"))
    assert alone.keys() == tracked.keys() and all(torch.equal(alone[name], tracked[name]) for name in alone)
