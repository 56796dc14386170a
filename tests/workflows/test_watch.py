"""penjing watch: what it shows of a run that grows, is rolled back, ends, or is over."""

import io
import json
import shutil
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penjing.base.errors import UserError
from penjing.base.lock import locked
from penjing.base.markup import Terminal
from penjing.cli import app
from penjing.report.live import LiveRun
from penjing.report.load_runs import ReportedRun
from penjing.report.text_format import run_state
from penjing.track.jsonl import RunFiles
from penjing.workflows import check_run
from penjing.workflows import watch as watching
from penjing.workflows.watch import watch

EVIL = "\x1b]0;owned\x07\x1b[2Jtold \x9b31mred"


@pytest.fixture
def run(tmp_path):
    """A run's folder, and what training writes into it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.toml").write_text('stage = "pretrain"\n')
    (folder / "plan.json").write_text(json.dumps({"steps": 40, "predicted_seconds": 90.0}))
    return folder, RunFiles(*(folder / f"{name}.jsonl" for name in ("metrics", "samples", "incidents")), resume_step=0)


def log(files, *steps, loss=8.0):
    for step in steps:
        speed = {"tokens_per_second": 12_345.0, "memory_bytes": 2**30, "mfu": 0.42, "learning_rate": 3e-4}
        files.log(step, {"loss": loss / step, "seconds": step * 2.0, "seconds_left": 80.0 - 2 * step, **speed})


def shown(*folders, console=None):
    console = console or Console(file=io.StringIO(), width=100)
    watch(folders, console)
    return console.file.getvalue()


def test_a_run_that_is_over_is_printed_once(run):
    folder, files = run
    log(files, 1, 2, 4)
    files.log(4, {"val_loss": 2.25, "val_bits_per_byte": 1.125})
    files.sample(4, [{"prompt": "Once", "text": f"Once {EVIL}"}])
    files.incident({"step": 3, "kind": "loss spike"})
    (folder / "outcome.json").write_text(json.dumps({"seconds": 100.0}))
    text = shown(folder)
    assert "finished, step 4 of 40" in text and "1 min 40 s, planned 1 min 30 s" in text
    for part in ("loss 2.000", "12.3k tok/s", "1.00 GiB", "MFU 42%", "3.0e-04", "held-out loss 2.250  1.125 bits"):
        assert part in text
    assert "step 3: loss spike" in text and "step 4: Once" in text and "told" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_a_killed_run_says_that_it_can_go_on(run):
    folder, files = run
    log(files, 1, 2)
    assert "killed, step 2 of 40" in shown(folder)
    (folder / "ended.json").write_text(json.dumps({"ended": "failed", "why": "it was NaN", "steps_done": 2}))
    assert "it was NaN" in shown(folder)
    assert "it was NaN" in check_run.examine(folder).notes[0]
    assert "it was NaN" in run_state(ReportedRun(folder, []))


def test_a_run_without_a_line_yet_is_shown(run):
    folder, _ = run
    with locked(folder):
        assert "running, step 0 of 40" in shown(folder)


def test_it_follows_a_rollback_and_a_resumed_run(run):
    folder, files = run
    log(files, 1, 2, 3, 4)
    live = LiveRun(folder)
    files.rewind(2)
    log(files, 3, 4, 5, loss=16.0)
    live.update()
    assert live.figures["loss"] == {1: 8.0, 2: 4.0, 3: 16 / 3, 4: 4.0, 5: 3.2} and live.step == 5


def test_it_goes_on_until_the_run_ends(run):
    folder, files = run
    log(files, 1)
    begun = threading.Event()
    console = Terminal(file=io.StringIO(), width=80, height=30, force_terminal=True)

    def training():
        with locked(folder):
            begun.set()
            for step in (2, 3, 4):
                while f"running, step {step - 1} of 40" not in console.file.getvalue():
                    time.sleep(0.01)
                log(files, step)
            (folder / "outcome.json").write_text(json.dumps({"seconds": 9.0}))

    thread = threading.Thread(target=training)
    thread.start()
    begun.wait()
    watch([folder], console, seconds=0.05)
    thread.join()
    text = console.file.getvalue()
    assert "finished, step 4 of 40" in text[text.rindex("running") :] and "loss 2.000" in text[text.rindex("running") :]


def test_a_run_that_is_deleted_hides_no_other(run, tmp_path, monkeypatch):
    folder, files = run
    log(files, 1)
    other = shutil.copytree(folder, tmp_path / "other")
    console = Terminal(file=io.StringIO(), width=80, height=30, force_terminal=True)
    looks = iter(
        [
            lambda: (shutil.rmtree(other), log(files, 2)),
            lambda: (folder / "outcome.json").write_text(json.dumps({"seconds": 9.0})),
        ]
    )
    monkeypatch.setattr(watching.time, "sleep", lambda _: next(looks)())
    with locked(folder):
        monkeypatch.setattr(watching, "is_locked", lambda _: False)  # the state decides
        watch([folder, other], console)
    assert "running, step 2 of 40" in console.file.getvalue()


def test_ctrl_c_leaves_it_and_the_cursor_is_back(run, monkeypatch):
    folder, files = run
    log(files, 1)

    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", interrupted)
    console = Terminal(file=io.StringIO(), width=80, height=30, force_terminal=True)
    with locked(folder):
        watch([folder], console)
    assert console.file.getvalue().rindex("\x1b[?25h") > console.file.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("width", [60, 130])
def test_several_runs_are_side_by_side_where_there_is_room(tmp_path, run, width):
    folder, files = run
    log(files, 1, 2)
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text("")
    text = shown(folder, other, console=Console(file=io.StringIO(), width=width))
    heads = [line for line in text.splitlines() if "step 2" in line and "killed" in line]
    assert ("other" in heads[0]) == (width == 130)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [1, 4, 9])
def test_a_pane_of_a_few_columns_ends_nothing(run, width):
    folder, files = run
    log(files, 1, 2)
    assert shown(folder, console=Console(file=io.StringIO(), width=width))


def test_the_command_prints_a_snapshot_into_a_pipe_and_refuses_what_is_no_run(run, tmp_path):
    folder, files = run
    log(files, 1, 2)
    with locked(folder):
        done = CliRunner().invoke(app, ["watch", str(folder)])
    assert done.exit_code == 0 and "running, step 2 of 40" in done.output and "\x1b" not in done.output
    failed = CliRunner().invoke(app, ["watch", str(tmp_path / "absent")])
    assert isinstance(failed.exception, UserError) and "absent" in failed.exception.line()
