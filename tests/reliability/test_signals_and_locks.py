"""Ctrl-C, kill and a closed terminal at any instant; two trainers in one folder; a run that is another than it was."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from reliability_harness import by_chance, state_of
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.lock import is_locked, locked, owner, unfinished
from penjing.checkpoint.load import newest
from penjing.train import signals
from penjing.train.load_model import read_settings
from penjing.train.resume import check_same_run
from penjing.train.signals import Signals

CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}
SLOW = """
import time, torch
import penjing.train.loop as loop
real = loop._gradients
def slow(parts):
    time.sleep(0.02)
    return real(parts)
loop._gradients = slow
"""
# A thread that sends the signal once so many steps are logged, and then so many seconds later.
SEND = (
    SLOW
    + """
import os, threading
def send():
    while not os.path.exists({path!r}) or open({path!r}).read().count("loss") < {lines}:
        time.sleep(0.003)
    for number in {numbers}:
        time.sleep({pause})
        os.kill(os.getpid(), number)
threading.Thread(target=send, daemon=True).start()
"""
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, server, stages):
    folder = tmp_path_factory.mktemp("whole") / "run"
    recipe, words = stages["pretrain"]
    status, seconds, said = server.run(recipe, [*words, "checkpoint.every=1000", "max_steps=30", f"out={folder}"])
    assert status == 0, said
    return state_of(folder), seconds


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("trials", by_chance(2, deep=60))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "SIGTERM" else pytest.mark.nightly) for name in CODES]
)
def test_signals_at_random_instants(tmp_path, server, stages, whole, count, name, trials):
    """Nothing but a signal saves here, so what is gone on with is what the signal saved: no step is taken again."""
    recipe, words = stages["pretrain"]
    wanted, _ = whole
    words = [*words, "checkpoint.every=1000", "max_steps=30"]
    rng, ended = random.Random(name), 0
    for trial in range(trials):
        folder = tmp_path / f"{trial}"
        send = SEND.format(
            path=str(folder / "metrics.jsonl"),
            lines=rng.randint(1, 18),
            numbers=[int(getattr(signal, name))],
            pause=rng.uniform(0, 0.02),
        )
        status, _, said = server.run(recipe, [*words, f"out={folder}"], before=send)
        assert status == CODES[name], said
        assert "the same command continues" in said
        steps = [line["step"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]
        assert next((folder / "checkpoints").iterdir()).name == f"step-{max(steps):08d}"
        ended += 1
        status, _, said = server.run(recipe, [*words, f"out={folder}"])
        assert status == 0, said
        assert state_of(folder) == wanted
    count(f"{name}: runs ended and gone on with", ended)


def test_a_second_signal_ends_at_once_and_harms_nothing(tmp_path, server, stages, whole):
    recipe, words = stages["pretrain"]
    words = [*words, "checkpoint.every=1000", "max_steps=30", f"out={tmp_path / 'run'}"]
    path = str(tmp_path / "run" / "metrics.jsonl")
    twice = SEND.format(path=path, lines=3, numbers=[int(signal.SIGTERM), int(signal.SIGINT)], pause=0.005)
    status, _, _ = server.run(recipe, words, before=twice)
    assert status in (143, 130)  # that of the first, where the run had ended before the second came
    status, _, said = server.run(recipe, words)
    assert status == 0, said
    assert state_of(tmp_path / "run") == whole[0]


def test_an_echo_of_a_signal_is_no_second_one(monkeypatch):
    ended, now = [], [0.0]
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for number, later in ((signal.SIGTERM, [143]), (signal.SIGHUP, [])):
        with Signals() as found:
            found._handle(number, None)
            now[0] += 0.5
            found._handle(number, None)
            assert found.received == number and ended == []
            now[0] += 1.0
            found._handle(number, None)
            assert ended == later
            ended.clear()
            found._handle(signal.SIGINT, None)
            assert ended == [130]
            ended.clear()


def test_a_long_validation_is_broken_off(tmp_path, server, stages):
    recipe, words = stages["pretrain"]
    slow = """
import time
import penjing.train.stages.next_token as tokens
validate = tokens.NextTokenStage.validate
calls = [0]
def slow_validate(self):
    calls[0] += 1
    if calls[0] > 1:  # the first is the plan's
        time.sleep(180)
    return validate(self)
tokens.NextTokenStage.validate = slow_validate
"""
    words = [*words, "eval.every=2", f"out={tmp_path / 'run'}"]
    path = str(tmp_path / "run" / "metrics.jsonl")
    send = SEND.format(path=path, lines=2, numbers=[int(signal.SIGTERM)], pause=1.0)
    status, seconds, said = server.run(recipe, words, before=slow + send)
    assert status == 143, said
    assert seconds < 120  # not 180, even on a busy machine
    status, _, said = server.run(recipe, words)
    assert status == 0, said
    assert "continues after step" in said


def test_an_ignored_hangup_stays_ignored():
    code = (
        "import signal, os\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from penjing.train.signals import Signals\n"
        "with Signals() as signals:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    assert signals.received is None\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert signals.received == signal.SIGTERM\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stopped_process_counts_no_time():
    code = (
        "import os, signal, time\n"
        "from penjing.train.signals import Signals, running_seconds\n"
        "with Signals():\n"
        "    began, wall = running_seconds(), time.perf_counter()\n"
        "    print('ready', flush=True)\n"
        "    while time.perf_counter() - wall < 1.5:\n"
        "        pass\n"
        "    assert running_seconds() - began < time.perf_counter() - wall - 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
    assert process.returncode == 0


# --- one writer ------------------------------------------------------------------------------------------------------

HOLD = "import sys, time\nfrom pathlib import Path\nfrom penjing.base.lock import locked\n"
HOLD += "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"


def test_a_second_trainer_is_refused_and_told_whose_it_is(tmp_path, server, stages):
    recipe, words = stages["pretrain"]
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert is_locked(tmp_path / "run")
        status, _, said = server.run(recipe, [*words, f"out={tmp_path / 'run'}"])
        assert status == 2
        assert f"process {holder.pid}" in said
        assert not (tmp_path / "run" / "checkpoints").exists()
    finally:
        holder.kill()
        holder.wait()
    assert not is_locked(tmp_path / "run")  # a dead owner's lock does not block
    status, _, said = server.run(recipe, [*words, f"out={tmp_path / 'run'}"])
    assert status == 0, said


def test_a_lock_is_given_back(tmp_path):
    with locked(tmp_path):
        assert is_locked(tmp_path)
        with raises_user_error(got=f"process {os.getpid()} "), locked(tmp_path):
            pass
    assert not is_locked(tmp_path)
    with locked(tmp_path):
        assert str(os.getpid()) in owner(tmp_path)
    assert owner(tmp_path / "other") is None


def test_two_that_write_one_export_or_average_are_told_apart(tmp_path):
    with unfinished(tmp_path / "out") as place:
        place.mkdir()
        with raises_user_error(got=f"process {os.getpid()} "), unfinished(tmp_path / "out"):
            pass
        assert place.is_dir()  # the first goes on
    assert list(tmp_path.iterdir()) == []
    place.mkdir(parents=True)  # as left by a kill
    with unfinished(tmp_path / "out") as place:
        assert not place.exists()


def test_a_file_in_the_place_of_a_run_is_called_one(tmp_path, server, stages):
    (tmp_path / "run").write_text("notes")
    recipe, words = stages["pretrain"]
    status, _, said = server.run(recipe, [*words, f"out={tmp_path / 'run'}"])
    assert status == 2 and f"{tmp_path / 'run'}: a file, not a folder" in said


# --- another run -----------------------------------------------------------------------------------------------------

# Of a whole run; every kind of setting: tests/train/test_same_run.py.
CHANGES = {
    "max_grad_norm": "max_grad_norm=0.5",
    "model.num_hidden_layers": "model.num_hidden_layers=2",
    "precision": "compute.dtype=bfloat16",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, server, stages):
    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe, words = stages["pretrain"]
    assert server.run(recipe, [*words, f"out={folder}"])[0] == 0
    return folder


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_is_refused_with_both_values(finished, server, stages, field):
    recipe, words = stages["pretrain"]
    before = (finished / "metrics.jsonl").read_bytes()
    status, _, said = server.run(recipe, [*words, CHANGES[field], f"out={finished}"])
    assert status == 2, said
    assert f"{field}" in said
    assert " was " in said and ", is " in said
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_all_differences_are_told_at_once(finished, server, stages):
    recipe, words = stages["pretrain"]
    status, _, said = server.run(recipe, [*words, "seed=9", "max_grad_norm=0.5", "batch.size=8", f"out={finished}"])
    assert status == 2
    for name in ("seed was 1, is 9", "max_grad_norm was 1.0, is 0.5", "batch.size was 4, is 8"):
        assert name in said


def test_a_changed_tokenizer_or_template_is_refused(finished, server, stages, copy_of):
    recipe, words = stages["pretrain"]
    for name, change in {
        "template": lambda folder: (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}"),
        "data": lambda folder: _touch_shards(folder),
    }.items():
        folder = copy_of(finished)
        change(folder)
        status, _, said = server.run(recipe, [*words, f"out={folder}"])
        assert status == 2, (name, said)
        assert "tokenizer" in said if name == "template" else "data" in said or "shards" in said


def _touch_shards(folder):
    for path in folder.glob("shards/*/shards.json"):
        meta = json.loads(path.read_text())
        meta["files"]["tokens.bin"]["sha256"] = "0" * 64
        path.write_text(json.dumps(meta))


def test_an_allowed_change_goes_on(finished):
    run, checkpoint = read_settings(finished), newest(finished / "checkpoints")
    changed = replace(run, max_grad_norm=0.25, seed=7)
    with pytest.raises(UserError, match=r"seed was 1, is 7"):
        check_same_run(changed, {}, checkpoint, ["max_grad_norm"])
    said = check_same_run(changed, {}, checkpoint, ["max_grad_norm", "seed"])
    assert [(each.field, each.saved, each.now) for each in said] == [("max_grad_norm", 1.0, 0.25), ("seed", 1, 7)]
    faster = replace(run, optimizer=replace(run.optimizer, learning_rate=1.0))
    assert check_same_run(faster, {}, checkpoint, ["optimizer"])
    with raises_user_error(where="--allow-change", got="sead", next_step="Did you mean seed"):
        check_same_run(changed, {}, checkpoint, ["sead"])


def test_another_optimizer_that_is_allowed_begins_afresh(copy_of, finished, server, stages):
    folder = copy_of(finished)
    for path in (folder / "checkpoints").glob("step-00000006"):
        shutil.rmtree(path)
    recipe, words = stages["pretrain"]
    other = "muon" if read_settings(folder).optimizer.name == "adamw" else "adamw"
    words = [*words, f"optimizer.name={other}", f"out={folder}"]
    assert server.run(recipe, words)[0] == 2
    status, _, said = server.run(recipe, words, allow_change=["optimizer", "schedule", "max_grad_norm"])
    assert status == 0, said
    assert "allowed to change: optimizer.name" in said
