"""Every tracker, by its real package without a network: what it has of a run that was killed, resumed, rolled back."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.registry import look_up
from penjing.track import TRACKERS
from penjing.workflows.train import execute, resolve_run

READ = Path(__file__).parents[1] / "read_trackers.py"
INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(look_up(TRACKERS, name, what="tracker").package)]
needs_all = pytest.mark.skipif(
    len(INSTALLED) < len(TRACKERS), reason=f'only {INSTALLED} of {list(TRACKERS)}: pip install "penjing[trackers]"'
)
# `at(index)` runs before a step; DELIVERED is how long a library may take to store what it was told.
TRAIN = """
import os, sys, time
from pathlib import Path
from rich.console import Console
from penjing.base.config import parse_overrides
from penjing.track import TRACKERS, process
from penjing.track.background import Delays
from penjing.train import loop
from penjing.workflows.train import execute, resolve_run

process.DELAYS = Delays(stored=0.7, save=0.0, pause=0.0, longest_pause=0.0)
real, folder = loop.step, Path(sys.argv[1])
def wait_for_trackers():
    while not all((folder / f"{name}.json").exists() for name in NAMES):
        time.sleep(0.05)
def step(context, index):
    at(context, index)
    return real(context, index)
loop.step = step
"""
KILLED = """
def at(context, index):
    if index == 0:
        wait_for_trackers()
    if index in (9, 11):
        time.sleep(1.5)
    if index == 13:
        os.kill(os.getpid(), 9)
"""
ROLLED_BACK = """
import torch
rolled = []
def at(context, index):
    if index == 0:
        wait_for_trackers()
    if index == 7 and not rolled:
        rolled.append(True)
        context.guard.observe = lambda *of_step: (delattr(context.guard, "observe"), "roll back")[1]
"""
PLAIN = "def at(context, index):\n    pass\n"
RUN = """
quiet = Console(file=open(os.devnull, 'w'))
execute(resolve_run('pretrain', parse_overrides(sys.argv[2:])), quiet, ['max_steps'])
"""


def train(folder, words, between=PLAIN, names=TRACKERS):
    """A training in a process without login, settings or network of the user's; returns its exit status."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    logins = ("WANDB", "SWANLAB", "MLFLOW", "TRACKIO", "HF_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(logins)}
    environment |= {"HOME": str(home), "NETRC": str(home / "netrc"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        environment[name] = "http://127.0.0.1:9"  # nothing answers there
    script = "\n".join([TRAIN, f"NAMES = {list(names)}", between, RUN])
    words = [*words, f"log.trackers={','.join(names)}", f"out={folder}"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *words], env=environment, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr and "left out" not in done.stderr, done.stderr[-3000:]
    return done.returncode


def read(folder, *names):
    done = subprocess.run([sys.executable, str(READ), str(folder), *names], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def curves(folder):
    """metric: (step, value) as the run's own file has them."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if value is not None and name != "step":
                found.setdefault(name, {})[row["step"]] = value
    return found


def assert_one_curve(tracker, folder, exact=("loss", "val_loss", "tokens", "learning_rate", "grad_norm")):
    """Each step once and in order, with the run's values; for times the steps alone."""
    for name, points in curves(folder).items():
        found = tracker["curves"][name]
        assert [step for step, _ in found] == list(points), name
        if name in exact:
            assert [value for _, value in found] == pytest.approx(list(points.values()), rel=1e-6), name


SAMPLES = ["sample.every=4", "sample.prompts=Once", "sample.max_new_tokens=4", "eval.at_start=true"]


@needs_all
@pytest.mark.parametrize("names", [list(TRACKERS)], ids=["all"])
def test_a_killed_and_resumed_run_is_one_curve_in_each(tmp_path, small_run, names):
    folder = tmp_path / "run"
    words = [*small_run, *SAMPLES, "max_steps=18", "checkpoint.every=5"]
    assert train(folder, words, KILLED, names) == -signal.SIGKILL
    ids = {name: json.loads((folder / f"{name}.json").read_text())["id"] for name in names}
    complete = {name: json.loads((folder / f"{name}.json").read_text())["complete"] for name in names}
    assert set(complete.values()) <= {8, 9, 10, 11}, "the test is of runs that are killed in the middle"
    assert train(folder, words, PLAIN, names) == 0
    found = read(folder, *names)
    metrics = curves(folder)
    assert list(metrics["loss"]) == list(range(1, 19)) and list(metrics["val_loss"]) == [0, 6, 12, 18]
    for name in names:
        assert_one_curve(found[name], folder)
        assert len(found[name]["ids"]) <= 1, "one run"
        assert json.loads((folder / f"{name}.json").read_text()) == {"id": ids[name], "complete": 18, "ended": True}
    assert found["wandb"]["ids"] == [ids["wandb"]] and found["swanlab"]["ids"] == [ids["swanlab"]]
    for name, extras in EXTRAS.items():
        missing = {extra for extra in extras if not any(extra in one for one in found[name]["others"])}
        assert not missing, (name, found[name]["others"])
    assert found["wandb"]["config"]["max_steps"] == found["trackio"]["config"]["max_steps"] == 18
    assert found["mlflow"]["config"]["max_steps"] == "18"


# What each has besides the curves.
EXTRAS = {
    "wandb": ["plan", "outcome", "report.html", *(f"table/samples_{step}_" for step in (4, 8, 12, 16, 18))],
    "swanlab": ["plan", "outcome", "report.html", "samples", "config"],
    "tensorboard": ["plan", "outcome", "samples", "config"],
    "trackio": ["plan", "outcome", "report", "samples"],
    "mlflow": ["plan.json", "outcome.json", "report.html", "samples", "FINISHED"],
}


@needs_all
def test_a_roll_back_is_one_curve_in_each(tmp_path, small_run):
    folder = tmp_path / "run"
    words = [*small_run, "max_steps=12", "checkpoint.every=5", "checkpoint.async=false"]
    assert train(folder, words, ROLLED_BACK) == 0
    found = read(folder)
    assert list(curves(folder)["loss"]) == list(range(1, 13))
    for name, tracker in found.items():
        kept_first = name == "swanlab"  # it keeps the values of before, as it cannot forget a step
        assert_one_curve(tracker, folder, exact=() if kept_first else ("loss", "val_loss"))


@needs_all
def test_a_tracker_that_is_added_later_gets_the_whole_run(tmp_path, small_run):
    folder = tmp_path / "run"
    assert train(folder, [*small_run, "max_steps=6"], names=["tensorboard"]) == 0
    words = [*small_run, "max_steps=9"]
    assert train(folder, words, names=["tensorboard", "mlflow"]) == 0
    for tracker in read(folder, "tensorboard", "mlflow").values():
        assert_one_curve(tracker, folder)
    assert list(curves(folder)["loss"]) == list(range(1, 10))


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_one_line_before_the_data_are_read(name, monkeypatch, tmp_path):
    package = look_up(TRACKERS, name, what="tracker").package
    monkeypatch.setitem(sys.modules, package, None)
    run = resolve_run("pretrain", parse_overrides([f"log.trackers={name}", f"out={tmp_path / 'run'}"]))
    with raises_user_error(where=f"log.trackers={name}", next_step=f'pip install "penjing[{name}]"'):
        execute(run, None)
    assert not (tmp_path / "run").exists()
