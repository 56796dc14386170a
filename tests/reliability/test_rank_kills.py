"""A random rank of a run on two is killed at a random moment; with --max-restarts the run continues by itself."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def ranks_of(launcher):
    """The processes that a launcher started, in the order of their ranks."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == launcher:
                found.append(int(status.parent.name))
        except (OSError, ValueError):
            continue
    return sorted(found)


def last_step(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@pytest.mark.timeout(20000)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"])
@pytest.mark.nightly
@pytest.mark.parametrize("times", [40])
def test_a_rank_killed_at_random(tmp_path, penjing, stages, count, strategy, times):
    recipe, words = stages["pretrain"]
    if strategy.startswith("zero"):
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip('needs pip install "penjing[deepspeed]"')
        words = [*words, "optimizer.name=adamw"]
    words = [recipe, *words, "max_steps=40", "checkpoint.every=1", f"parallel.strategy={strategy}"]
    ranks = 4 if strategy == "hsdp" else 2  # two groups of two
    penjing("train", *words, f"out={tmp_path / 'whole'}", ranks=ranks)
    whole = json.loads((tmp_path / "whole/outcome.json").read_text())
    dice, seconds = random.Random(strategy), []
    for number in range(times):
        folder = tmp_path / str(number)
        command = [sys.executable, "-m", "penjing", "train", *map(str, words), f"out={folder}"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", "1"]
        launcher = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        at = dice.randrange(1, 36)
        while last_step(folder) < at:
            assert launcher.poll() is None
            time.sleep(dice.random() / 50)
        os.kill(dice.choice(ranks_of(launcher.pid)), signal.SIGKILL)
        killed, at = time.monotonic(), last_step(folder)
        while last_step(folder) <= at and launcher.poll() is None:
            time.sleep(0.05)
        seconds.append(time.monotonic() - killed)
        print(f"{strategy} {number}: {seconds[-1]:.1f} s until the step after {at}")
        assert launcher.wait(timeout=600) == 0
        ended = json.loads((folder / "outcome.json").read_text())
        assert (ended["resumed"], ended["weights_sha256"]) == (1, whole["weights_sha256"])
    assert max(seconds) < 30, "not back within 30 s"
    count(f"ranks killed under {strategy}", times)
