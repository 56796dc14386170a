"""Runs with noise, a second loss, decay, a start from the text: resumed exactly, in any passes, validated as ever."""

import json

import pytest
import torch
from short_runs import cut_back, newest, train, weights_of
from user_errors import raises_user_error

from penjing.base.config import parse_overrides
from penjing.base.files import sha256_file
from penjing.checkpoint.manifest import MANIFEST, manifest_text, read_manifest
from penjing.loader.batch_source import PackedSource
from penjing.parallel.base import make_strategy
from penjing.train.build import prepare_run
from penjing.train.load_model import load_trained
from penjing.train.stages.example_batches import example_rows
from penjing.workflows.train import resolve_run

NOISE = "regularization.dropout=0.2"
EMPTY = example_rows(2, 4, torch.device("cpu"))
OFF = "cautious_decay = false"
FACTORS = "weight_decay_factors = []"
MTP = "objective.mtp_weight=0.5"
BPE = "regularization.bpe_dropout=0.2"
DECAY = "optimizer.weight_decay=0.5"
START = "embedding_init=cooccurrence"


def metrics(folder, name):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if name in line}


def as_of_an_older_version(folder):
    """Write settings that exist no longer to a run and its checkpoint, with the values that had no effect."""
    path = newest(folder) / "run.toml"
    text = path.read_text()
    for group, more in (
        ("regularization", "stochastic_depth = 0.0\nmasked_inputs = 0"),
        ("optimizer", OFF),
        ("schedule", FACTORS),
    ):
        text = text.replace(f"[{group}]\n", f"[{group}]\n{more}\n")
    assert OFF in text and "masked_inputs" in text
    path.write_text(text)
    (folder / "run.toml").write_text(text)
    manifest = read_manifest(path.parent)
    manifest["files"]["run.toml"] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (path.parent / MANIFEST).write_text(manifest_text({"step": manifest["step"]}, manifest["files"]))


def test_a_run_resumes_exactly_and_splits_alike(small_run, tmp_path):
    words = [*small_run, START, NOISE, MTP, BPE, DECAY, "max_steps=6"]
    whole, resumed, split = tmp_path / "whole", tmp_path / "resumed", tmp_path / "split"
    train("pretrain", *words, f"out={whole}")
    cut_back(whole, resumed, 3)
    as_of_an_older_version(resumed)
    assert load_trained(resumed).checkpoint.step == 3
    train("pretrain", *words, f"out={resumed}")
    expected, found = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    train("pretrain", *words, "batch.micro_size=2", "compute.activation_checkpointing=block", f"out={split}")
    assert metrics(split, "loss") == pytest.approx(metrics(whole, "loss"), abs=1e-5)
    assert metrics(split, "val_loss") == pytest.approx(metrics(whole, "val_loss"), abs=1e-5)


def test_each_row_of_the_order_has_a_seed_of_its_own():
    def seeds(rank, world, start=0):
        source = PackedSource(None, micro_size=2, rank=rank, world=world, make=lambda indices: EMPTY, noise_seed=3)
        source.restore({"next_row": start})
        return next(source).noise_B.tolist()

    assert len({*seeds(0, 1), *seeds(0, 1, 2)}) == 4
    assert [*seeds(0, 2), *seeds(1, 2)] == [*seeds(0, 1), *seeds(0, 1, 2)]


def test_the_weight_of_the_second_loss_falls_to_zero_at_two_thirds_of_the_steps(small_run, tmp_path):
    run = resolve_run("pretrain", {"out": str(tmp_path)}, parse_overrides([*small_run, MTP, "max_steps=6"]))
    prepared = prepare_run(run, make_strategy("cpu"))
    source, (accumulate, steps) = prepared.context.source, (prepared.context.accumulate, range(6))
    weights = [{float(next(source).mtp_weight) for _ in range(accumulate)} for _ in steps]
    assert weights == [{0.5}, {0.375}, {0.25}, {0.125}, {0.0}, {0.0}]
    source.close()


def test_a_removed_setting_is_accepted_only_where_it_is_off():
    off = ["regularization.stochastic_depth=0", "regularization.masked_inputs=0.0", "optimizer.cautious_decay=false"]
    factors = "schedule.weight_decay_factors="
    assert resolve_run("pretrain", parse_overrides([*off, f"{factors}[]"])) == resolve_run("pretrain")
    with raises_user_error(where=factors[:-1]):
        resolve_run("pretrain", parse_overrides([f"{factors}1,0.1"]))
    for setting in off:
        name = setting.split("=")[0]
        with raises_user_error(where=name):
            resolve_run("pretrain", parse_overrides([f"{name}={'true' if 'cautious' in name else 0.1}"]))


@pytest.mark.parametrize("objective", ["policy", "preference", "reward"])
def test_noise_is_refused_where_rows_have_no_seeds(objective):
    with raises_user_error(where="regularization", got=f"objective.name={objective}"):
        resolve_run("pretrain", parse_overrides([f"objective={objective}", NOISE]))
    with raises_user_error(where="regularization.bpe_dropout", got="data.format=chats"):
        resolve_run("sft", parse_overrides([BPE]))
    with raises_user_error(where="embedding_init"):
        resolve_run("pretrain", parse_overrides([f"objective={objective}", START]))
