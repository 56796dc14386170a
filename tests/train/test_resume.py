"""A run that is stopped anyhow and continued by the same command ends in the same weights, bit for bit."""

import json
import signal
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def whole(tmp_path_factory, penjing, small_run):
    """An uninterrupted run to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    penjing("train", "pretrain", *small_run, f"out={folder}")
    return folder


def checkpoint(folder: Path, step: int) -> str:
    return str(folder / "checkpoints" / f"step-{step:08d}")


def test_the_same_seed_gives_the_same_weights(tmp_path, whole, penjing, small_run, outcome):
    penjing("train", "pretrain", *small_run, f"out={tmp_path / 'again'}")
    assert outcome(tmp_path / "again")["weights_sha256"] == outcome(whole)["weights_sha256"]


def test_a_runs_label_changes_nothing(tmp_path, whole, penjing, small_run, outcome):
    penjing("train", "pretrain", *small_run, "stage=rehearsal", f"out={tmp_path / 'out'}")
    assert outcome(tmp_path / "out")["weights_sha256"] == outcome(whole)["weights_sha256"]


def test_another_seed_gives_other_weights(tmp_path, whole, penjing, small_run, outcome):
    penjing("train", "pretrain", *small_run, "seed=2", f"out={tmp_path / 'other'}")
    assert outcome(tmp_path / "other")["weights_sha256"] != outcome(whole)["weights_sha256"]


def test_kill_9_and_the_same_command(tmp_path, whole, server, penjing, small_run, outcome, losses):
    folder = tmp_path / "run"
    words = ("train", "pretrain", *small_run, f"out={folder}")
    for step in (3, 6, 9):
        assert server.command(*words, kill_when=checkpoint(folder, step)).returncode == -signal.SIGKILL
    done = penjing(*words)
    assert "continues after step" in done.stdout
    assert f"penjing report {folder}" in done.stdout
    assert outcome(folder)["weights_sha256"] == outcome(whole)["weights_sha256"]
    assert losses(folder) == losses(whole)


@pytest.mark.parametrize("state", [pytest.param("bfloat16", marks=pytest.mark.nightly), "int8"])
def test_kill_9_with_optimizer_state_in_less_than_float32(tmp_path, server, penjing, small_run, outcome, state):
    # small tensors stay float32
    larger = ["model.hidden_size=64", "model.intermediate_size=96", f"optimizer.state_dtype={state}"]
    words = ("train", "pretrain", *small_run, *larger)
    penjing(*words, f"out={tmp_path / 'straight'}")
    killed = server.command(*words, f"out={tmp_path / 'run'}", kill_when=checkpoint(tmp_path / "run", 6))
    assert killed.returncode == -signal.SIGKILL
    assert "continues after step" in penjing(*words, f"out={tmp_path / 'run'}").stdout
    assert outcome(tmp_path / "run")["weights_sha256"] == outcome(tmp_path / "straight")["weights_sha256"]


def test_a_signal_saves_and_says_so(tmp_path, whole, server, penjing, small_run, outcome):
    """Of the command; every signal, at any instant: tests/reliability/test_signals_and_locks.py."""
    folder = tmp_path / "run"
    words = ("train", "pretrain", *small_run, "checkpoint.every=1000", f"out={folder}")
    done = server.command(*words, kill_when=str(folder / "metrics.jsonl"), signal=signal.SIGTERM)
    if done.returncode == 0:
        pytest.skip("the run ended before the signal came")
    assert done.returncode == 143, done.stdout + done.stderr
    assert "the same command continues" in done.stderr
    assert len(list((folder / "checkpoints").iterdir())) == 1
    penjing(*words)
    assert outcome(folder)["weights_sha256"] == outcome(whole)["weights_sha256"]


def test_a_finished_run_is_left_alone(whole, penjing, small_run, outcome):
    before = outcome(whole)
    penjing("train", "pretrain", *small_run, f"out={whole}")
    assert outcome(whole) == before


def test_an_allowed_change_goes_on(tmp_path, penjing, small_run):
    folder = tmp_path / "run"
    penjing("train", "pretrain", *small_run, f"out={folder}")
    words = ("train", "pretrain", *small_run, "max_steps=15", f"out={folder}")
    refused = penjing(*words, check=False)
    assert refused.returncode == 2
    assert "max_steps was 12, is 15" in refused.stderr
    assert "--allow-change max_steps" in refused.stderr
    done = penjing(*words, "--allow-change", "max_steps")
    assert "allowed to change: max_steps was 12, is 15" in done.stdout
    assert "step 15/15" in done.stdout
    assert json.loads((folder / "plan.json").read_text())["steps"] == 15
    assert penjing(*words, "--allow-change", "max_steps").returncode == 0
    done = penjing("doctor", str(folder))
    assert "continues" not in done.stdout


def test_other_data_is_refused(tmp_path, whole, toy, penjing, small_run):
    other = tmp_path / "pretrain.jsonl"
    other.write_text("".join((toy / "pretrain.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:300]))
    words = [word for word in small_run if not word.startswith("data.train")]
    done = penjing("train", "pretrain", *words, f"data.train={other}", f"out={whole}", check=False)
    assert done.returncode == 2
    assert "data was" in done.stderr


def test_more_accumulation_is_the_same_run(tmp_path, whole, penjing, small_run, losses):
    penjing("train", "pretrain", *small_run, "batch.micro_size=2", f"out={tmp_path / 'run'}")
    expected, got = losses(whole), losses(tmp_path / "run")
    assert got.keys() == expected.keys()
    assert max(abs(got[step] - expected[step]) for step in expected) < 1e-5
