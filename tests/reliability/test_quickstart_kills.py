"""`kill -9` at any instant of the quickstart: the same command goes on, says from where, and ends in the same bits."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from reliability_harness import SHAPE

from penjing.base.files import read_json
from penjing.checkpoint.manifest import steps

TRAINED = ("pretrain", "sft")
KILLS = 3  # of each quickstart
# The short quickstart with a smaller model, so that a run takes seconds; every stage is there.
WORDS = [*SHAPE[2:], "eval.sequences=16", "sft.eval.sequences=16", "checkpoint.every=2", "sft.checkpoint.every=2"]


def begin(out, log):
    """The command, as the leader of a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "penjing", "quickstart", "--short", "--out", str(out), *WORDS],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "500"},
        start_new_session=True,
    )


def kill(process):
    """End its whole group at once; the exit code."""
    os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
    return process.wait()


def finish(out, log):
    """Run it to its end; all that it said."""
    with open(log, "w+", encoding="utf-8") as stream:
        assert begin(out, stream).wait(240) == 0, log.read_text(encoding="utf-8")
    return log.read_text(encoding="utf-8")


def weights(out):
    """SHA-256 of each stage's final weights."""
    return {stage: read_json(out / stage / "outcome.json")["weights_sha256"] for stage in TRAINED}


def found(out):
    """What is there to go on with: the stages that are done, and of the one under way the last checkpoint's step."""
    journal = out / "quickstart.json"
    done = [entry["name"] for entry in read_json(journal)["stages"]] if journal.is_file() else []
    under_way = [stage for stage in TRAINED if stage not in done]
    there = steps(out / under_way[0] / "checkpoints") if under_way else []
    return done, there[0] if there else None


def says_from_where(said, there):
    """Every stage that was done is shown as that, and the one under way goes on after its last checkpoint."""
    done, step = there
    for name in done:
        assert re.search(rf"^{name}: .*\(from before\)", said, re.MULTILINE), (name, said)
    assert re.findall(r"continues after step (\d+) of", said) == ([] if step is None else [str(step)]), said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: (weights, seconds from its start to the first files and to the end)."""
    folder = tmp_path_factory.mktemp("quickstart")
    began = time.monotonic()
    with open(folder / "log", "w", encoding="utf-8") as log:
        process = begin(folder / "out", log)
        while not (folder / "out" / "quickstart.json").exists():
            assert process.poll() is None, (folder / "log").read_text(encoding="utf-8")
            time.sleep(0.01)
        first = time.monotonic() - began
        assert process.wait(240) == 0, (folder / "log").read_text(encoding="utf-8")
    return weights(folder / "out"), first, time.monotonic() - began


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trials", [10])
def test_killed_at_random_instants(tmp_path, whole, count, trials):
    wanted, first, seconds = whole
    rng, killed, log = random.Random(7), 0, tmp_path / "log"
    for trial in range(trials):
        out = tmp_path / f"out{trial}"
        for _ in range(KILLS):
            with open(log, "w", encoding="utf-8") as stream:
                process = begin(out, stream)
                time.sleep(first + rng.uniform(0, 0.5) * (seconds - first))
                status = kill(process)
            assert status in (0, -signal.SIGKILL), log.read_text(encoding="utf-8")
            killed += status != 0
        there = found(out)
        says_from_where(finish(out, log), there)
        assert weights(out) == wanted
        assert [entry["state"] for entry in read_json(out / "quickstart.json")["stages"]] == ["done"] * 5
        shutil.rmtree(out)
    assert killed >= trials  # few runs were over before
    count("quickstarts killed and gone on with", trials)
    count("kills", killed)


@pytest.mark.nightly
def test_killed_as_soon_as_a_stage_has_a_checkpoint(tmp_path, server, count):
    """Not at any instant, but where there is a step to name, in both stages of one quickstart."""
    out, words = tmp_path / "out", ("quickstart", "--short", *WORDS, "--out")
    whole = server.command(*words, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    for stage in TRAINED:
        there = found(out)
        done = server.command(*words, out, kill_when=str(out / stage / "checkpoints" / "step-00000002"))
        assert done.returncode == -signal.SIGKILL
        says_from_where(done.stdout, there)
        assert found(out)[1] is not None
    there = found(out)
    done = server.command(*words, out)
    assert done.returncode == 0, done.stderr
    says_from_where(done.stdout, there)
    assert weights(out) == weights(tmp_path / "whole")
    count("quickstarts killed and gone on with", 1)
    count("kills", len(TRAINED))
