"""What the reliability tests share: the shape of small runs, and what a run's state is."""

import hashlib
import json
from pathlib import Path

import pytest

SHAPE = [
    "model.preset=tiny", "model.vocab_size=400", "model.hidden_size=16", "model.num_hidden_layers=1",
    "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=8", "model.intermediate_size=24",
]  # fmt: skip
COMMON = [
    "compute.device=cpu", "compute.dtype=float32", "compute.threads=1", "batch.size=4", "max_steps=6",
    "checkpoint.every=1",
    "eval.every=0", "eval.sequences=4", "sample.every=0", "log.every=1",
]  # fmt: skip


def by_chance(number, deep=None):
    """How many cases a test draws by chance: `number` in `make test`, else `deep` or ten times as many."""
    return [pytest.param(number, marks=pytest.mark.usual), pytest.param(deep or 10 * number, marks=pytest.mark.nightly)]


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
