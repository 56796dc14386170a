"""Pieces are cleaned by datatrove as by our own processes: here by a stand-in, and in the deep set by itself."""

import importlib.util
import json
import os
import random
import sys
import types

import pytest
from user_errors import raises_user_error

from penjing.data.clean import engine
from penjing.data.clean.cluster import Cluster
from penjing.data.clean.engine import clean
from penjing.data.clean.pieces import make_pieces
from penjing.data.clean.pipeline import Pipeline


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus of several pieces, with duplicates across them."""
    monkeypatch.setattr(engine, "make_pieces", lambda files, folder: make_pieces(files, folder, 20_000))
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["river", "stone", "cloud", "lamp", "door"], k=60)) for _ in range(300)]
    rows = [{"text": text} for text in [*texts, *texts[::3]]]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cleaned(corpus, out, cluster=None):
    pipeline = Pipeline.load(["unicode", "exact_duplicates", "near_duplicates"])
    counts = clean([corpus], out, kind="documents", pipeline=pipeline, workers=1, cluster=cluster)
    files = {path.name: path.read_bytes() for path in sorted(out.glob("*.jsonl"))}
    return {**files, "trace": (out / "_cleaning/trace.jsonl").read_bytes()}, counts


def cluster_of(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Cluster.load(path)


class Executor:
    """Runs the tasks at once; like Slurm's, those of number `lost` and above never end."""

    job_id = 7

    def __init__(self, pipeline, tasks, logging_dir, skip_completed, workers=1, lost=1 << 30):
        (self.step,), self.tasks, self.logs, self.lost = pipeline, tasks, logging_dir, lost
        assert not skip_completed

    def run(self):
        os.makedirs(f"{self.logs}/completions")
        for rank in range(min(self.tasks, self.lost)):
            for _ in self.step(None, rank, self.tasks):
                pass
            open(f"{self.logs}/completions/{rank:05d}", "w").close()


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("datatrove.executor")
    module.LocalPipelineExecutor = module.SlurmPipelineExecutor = Executor
    package = types.ModuleType("datatrove")
    package.executor = module
    monkeypatch.setitem(sys.modules, "datatrove", package)
    monkeypatch.setitem(sys.modules, "datatrove.executor", module)


def test_the_output_is_that_of_our_own_processes(corpus, tmp_path, stand_in):
    ours, counts = cleaned(corpus, tmp_path / "ours")
    theirs, _ = cleaned(corpus, tmp_path / "theirs", cluster_of(tmp_path, "[local]\nworkers = 2\n"))
    assert len(ours) > 3
    assert counts["dropped"] >= 100
    assert theirs == ours


def test_a_lost_task_is_an_error_and_the_next_run_continues(corpus, tmp_path, stand_in, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\n")  # no job is left
    squeue.chmod(0o755)
    with raises_user_error(what="tasks failed", got="2 of"):
        cleaned(corpus, tmp_path / "out", cluster_of(tmp_path, "[slurm]\nlost = 2\n"))
    assert cleaned(corpus, tmp_path / "out")[0] == cleaned(corpus, tmp_path / "ours")[0]


@pytest.mark.parametrize("text", ["", "[kubernetes]\n", "[ray]\n[local]\n", "ray = 3\n"])
def test_what_is_no_cluster_is_refused(text, tmp_path):
    with raises_user_error(what="not a cluster", where="cluster.toml"):
        cluster_of(tmp_path, text)


def test_an_unknown_setting_is_named(corpus, tmp_path, stand_in):
    with raises_user_error(what="partitions", where="cluster.toml"):
        cleaned(corpus, tmp_path / "out", cluster_of(tmp_path, "[local]\npartitions = 2\n"))


def test_without_datatrove_the_extra_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with raises_user_error(what="datatrove", next_step="penjing[data,cluster]"):
        cleaned(corpus, tmp_path / "out", cluster_of(tmp_path, "[ray]\n"))


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["[local]\nworkers = 2\n", "[ray]\nworkers = 2\nmem_per_cpu_gb = 0.5\n"])
def test_datatrove_itself(text, corpus, tmp_path, monkeypatch):
    if importlib.util.find_spec("datatrove") is None or ("ray" in text and importlib.util.find_spec("ray") is None):
        pytest.skip("needs datatrove: pip install 'penjing[cluster]'")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # Ray writes there
    theirs, _ = cleaned(corpus, tmp_path / "theirs", cluster_of(tmp_path, text))
    assert theirs == cleaned(corpus, tmp_path / "ours")[0]
