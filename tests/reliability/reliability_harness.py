"""What the reliability tests share: a fork server, the shape of small runs, and what a run's state is."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = Path(__file__).with_name("fork_server.py")
SHAPE = [
    "model.preset=tiny", "model.vocabulary_size=400", "model.hidden_size=16", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=1", "model.head_size=8", "model.mlp_size=24",
]  # fmt: skip
COMMON = [
    "compute.device=cpu", "compute.dtype=float32", "compute.threads=1", "batch.rows=4", "steps=6", "save.every=1",
    "validate.every=0", "validate.rows=4", "sample.every=0", "track.every=1",
]  # fmt: skip


def by_chance(number):
    """How many cases a test draws by chance: `number` in CI, and ten times as many with `pytest -m nightly`."""
    return [number, pytest.param(10 * number, marks=pytest.mark.nightly)]


class Server:
    """Trainings in children of another process."""

    def __init__(self, folder):
        self.folder, self.jobs = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        assert self.process.stdout.readline().strip() == "ready"

    def run(self, recipe, words, **how):
        """(exit code or minus the signal, seconds, what it said)."""
        self.jobs += 1
        log = self.folder / f"{self.jobs}.log"
        job = {"recipe": recipe, "words": list(map(str, words)), "log": str(log), **how}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["status"], answer["seconds"], log.read_text(encoding="utf-8") if log.exists() else ""

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


def state_of(folder, every=False):
    """SHA-256 of everything a run has learned and has to go on with: weights, optimizer, random numbers, place in the
    data, schedule, sums, guard. Not of how long it took or how often it was taken up.

    every: of each of its checkpoints, by name.
    """
    found = sorted((Path(folder) / "checkpoints").glob("step-*"))
    return {place.name: _hash(place) for place in found} if every else _hash(found[-1])


def _hash(place):
    digest = hashlib.sha256()
    for name in ("model.safetensors", "optimizer.safetensors"):
        digest.update((place / name).read_bytes())
    state = json.loads((place / "state.json").read_text(encoding="utf-8"))
    state.pop("resumed")
    state["meter"] = state["meter"]["tokens"]
    if state["source"].get("round"):  # holds how long sampling took
        state["source"]["round"] = True
    sums = state["progress"]["sums"]
    state["progress"]["sums"] = {name: value for name, value in sums.items() if "second" not in name}
    digest.update(json.dumps(state, sort_keys=True).encode())
    return digest.hexdigest()
