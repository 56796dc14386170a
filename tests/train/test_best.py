"""Runs of several epochs: the lowest held-out loss is kept, the run may stop there, and weights may be averaged."""

import json
import random
import shutil
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
from short_runs import cut_back, newest, train, weights_of
from user_errors import raises_user_error

from penjing.checkpoint.delivered import choose
from penjing.optim.ema import Ema, averaged
from penjing.report.load_runs import ReportedRun
from penjing.report.text_format import run_state
from penjing.train.best import BestLoss
from penjing.train.load_model import load_trained
from penjing.ui.live_runs import LiveRun
from penjing.workflows.train import resolve_run

FEW = ["max_steps=90", "batch.size=4", "data.seq_len=32", "eval.every=5", "checkpoint.every=1000", "log.every=5"]
HOT = ["optimizer.learning_rate=0.05", "schedule=constant", "schedule.warmup_ratio=0", "checkpoint.keep_last=1"]


@pytest.fixture(scope="module")
def few_texts(tmp_path_factory):
    """Texts that a small model learns by heart, and others that they say nothing about."""
    folder = tmp_path_factory.mktemp("few")
    words = [chr(97 + first) + chr(97 + second) for first in range(8) for second in range(8)]
    for name, seed, count in (("train", 1, 12), ("held_out", 2, 6)):
        draw = random.Random(seed)
        texts = [" ".join(draw.choices(words, k=40)) for _ in range(count)]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [f"data.train={folder / 'train.jsonl'}", f"data.validation={folder / 'held_out.jsonl'}"]


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory, small_run, few_texts):
    """A run that stops early, and what it said."""
    folder = tmp_path_factory.mktemp("best") / "run"
    words = [*small_run, *FEW, *HOT, *few_texts, f"out={folder}"]
    return folder, [*words, "eval.patience=4"], train("pretrain", *words, "eval.patience=4")


def validations(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def state_of(folder):
    return json.loads((newest(folder) / "state.json").read_text())


def test_an_average_is_that_of_a_plain_loop_and_skips_bad_steps():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300))
    ema, exact, count = Ema([weight], decay=0.9), None, 0
    for index in range(150):
        bad = index % 7 == 4
        ema.found_inf = torch.tensor(float(bad))
        if not bad:
            weight.data += 0.1 * torch.randn(300)
            count += 1
            decay = min(0.9, (count - 1) / (count + 9))
            wide = weight.detach().double()
            exact = wide.clone() if exact is None else decay * exact + (1 - decay) * wide
        before = {name: value.clone() for name, value in ema.state[weight].items()}
        ema.step()
        if bad:
            assert all(torch.equal(value, before[name]) for name, value in ema.state[weight].items())
    torch.testing.assert_close(ema.state[weight]["average"].double(), exact, atol=1e-6, rtol=0)
    raw, average = weight.detach().clone(), ema.state[weight]["average"].clone()
    with averaged([ema], nullcontext), averaged([ema], nullcontext):
        assert torch.equal(weight, average)
    assert torch.equal(weight, raw)
    assert torch.equal(ema.state[weight]["average"], average)


def test_averages_are_validated_saved_and_resumed_bit_for_bit(tmp_path, small_run):
    raw = [*small_run, "optimizer.weight_decay=0.1", "checkpoint.keep_last=9"]
    words = [*raw, "ema_decay=0.9"]
    train("pretrain", *words, f"out={tmp_path / 'whole'}")
    train("pretrain", *raw, f"out={tmp_path / 'raw'}")
    plain, mean = weights_of(tmp_path / "raw"), weights_of(tmp_path / "whole")
    state = safetensors.torch.load_file(newest(tmp_path / "whole") / "optimizer.safetensors")
    saved = sorted(float(value.double().sum()) for name, value in state.items() if name.endswith(".average"))
    assert saved == sorted(float(value.double().sum()) for value in plain.values())  # training itself is the same
    assert any(not torch.equal(plain[name], mean[name]) for name in plain)
    cut_back(tmp_path / "whole", tmp_path / "again", 6)
    train("pretrain", *words, f"out={tmp_path / 'again'}")
    again = weights_of(tmp_path / "again")
    assert all(torch.equal(again[name], mean[name]) for name in mean)
    assert validations(tmp_path / "again") == validations(tmp_path / "whole")
    assert validations(tmp_path / "whole")[6] != validations(tmp_path / "raw")[6]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_averages_of_two_ranks_are_those_of_one(tmp_path, small_run, penjing, strategy):
    words = [*small_run, "max_steps=6", "eval.every=2", "ema_decay=0.9", "batch.micro_size=2"]
    train("pretrain", *words, f"out={tmp_path / 'one'}")
    penjing("train", "pretrain", *words, f"parallel.strategy={strategy}", f"out={tmp_path / 'two'}", ranks=2)
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    assert validations(tmp_path / "two") == pytest.approx(validations(tmp_path / "one"), abs=1e-5)


def test_deepspeed_and_losses_that_measure_nothing_are_refused_by_name():
    with raises_user_error(where="ema_decay", got="zero2"):
        resolve_run("pretrain", {"ema_decay": 0.99, "optimizer": {"name": "adamw"}, "parallel": {"strategy": "zero2"}})
    with raises_user_error(where="eval.patience", got="preference"):
        resolve_run("dpo", {"eval": {"patience": 3}})


def test_a_run_that_overfits_says_so_once_and_stops(overfitted):
    folder, words, said = overfitted
    losses = validations(folder)
    best = min(losses, key=losses.get)
    steps = sorted(losses)
    assert steps.index(max(steps)) - steps.index(best) == 4
    assert max(steps) < 90
    assert said.count("above its best") == 1
    kept = state_of(folder)["best"]["kept"]
    assert (kept["step"], kept["loss"]) == (best, losses[best])
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        f"step-{step:08d}" for step in (best, max(steps))
    }
    outcome = json.loads((folder / "outcome.json").read_text())
    assert (outcome["steps_done"], outcome["val_loss"]) == (max(steps), losses[best])
    assert outcome["delivered"]["step"] == best
    assert outcome["delivered"]["why"] in said
    again = train("pretrain", *words)
    assert "eval.patience=0" in again
    assert outcome["delivered"]["why"] in again
    assert validations(folder) == losses
    assert json.loads((folder / "outcome.json").read_text()) == outcome


def test_the_best_is_used_unless_a_checkpoint_is_named(overfitted):
    """By every reader of a model, as all load it in one place; and `init_from`."""
    folder, words, _ = overfitted
    losses = validations(folder)
    best, last = min(losses, key=losses.get), max(losses)
    assert load_trained(folder).checkpoint.step == best
    assert load_trained(newest(folder)).checkpoint.step == last
    assert ReportedRun(folder, []).delivered == (best, last, losses[best], losses[last], "loss")
    assert f"Step {best} is used" in run_state(ReportedRun(folder, []))
    words = [word for word in words if not word.startswith(("out=", "max_steps"))]
    after = folder.parent / "after"
    train("pretrain", *words, f"init_from={folder}", "max_steps=1", "eval.at_start=true", f"out={after}")
    assert validations(after)[0] == pytest.approx(losses[best], rel=0.002)
    row = LiveRun(folder, "run").row()
    assert (row["delivered"]["step"], row["state"]) == (best, "finished")


def test_a_damaged_best_one_is_named(tmp_path, overfitted):
    folder, _, _ = overfitted
    shutil.copytree(folder, tmp_path / "run")
    best = load_trained(folder).checkpoint.folder.name
    (tmp_path / "run/checkpoints" / best / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=f"{best}: model.safetensors is missing"):
        used = load_trained(tmp_path / "run").checkpoint.folder
    assert used.name == newest(folder).name


def test_the_adapter_in_the_folder_names_the_step_that_it_is_of(overfitted):
    folder, words, _ = overfitted
    words = [word for word in words if not word.startswith(("out=", "max_steps"))]
    after = folder.parent / "adapted"
    train("pretrain", *words, f"init_from={folder}", "max_steps=20", "lora.rank=2", f"out={after}")
    step = json.loads((after / "outcome.json").read_text())["delivered"]["step"]
    assert json.loads((after / "adapter/penjing_adapter.json").read_text())["step"] == step < 20


@pytest.mark.parametrize(("last", "step"), [(2.003, 500), (2.006, 300), (1.9, 500), (None, 300)])
def test_the_newest_is_used_unless_it_is_clearly_worse(last, step):
    assert choose({"kept": {"step": 300, "loss": 2.0}, "last": last}, 500).step == step
    assert choose({}, 500).step == 500


def test_a_held_out_loss_that_is_nan_is_a_bad_one():
    best = BestLoss(resolve_run("pretrain", {"eval": {"patience": 2}}))
    assert best.observe(100, {"val_loss": 3.0, "val_other": float("nan")}, due=True)
    assert not best.observe(200, {"val_loss": 2.0}, due=True, finite=False)  # no checkpoint is written
    assert not best.observe(300, {"val_loss": float("nan")}, due=True)
    state = json.loads(json.dumps(best.state(), allow_nan=False))
    used = choose(state, 300)
    assert (used.step, used.loss, used.newest_loss) == (100, 3.0, None) and "NaN" in used.why
    assert not best.stopped
    best.observe(400, {"val_loss": float("inf")}, due=True)
    assert best.stopped


def test_the_choice_names_what_the_run_follows():
    best = {"kept": {"step": 300, "loss": 0.01}, "last": 0.02, "_measure": "val_ranking_loss 64 validation"}
    assert "held-out ranking loss 0.0100" in choose(best, 500).why


def test_a_killed_run_knows_its_best(tmp_path, overfitted):
    folder, words, _ = overfitted
    best = state_of(folder)["best"]
    cut_back(folder, tmp_path / "run", best["kept"]["step"])
    train("pretrain", *words, f"out={tmp_path / 'run'}")
    assert state_of(tmp_path / "run")["best"] == best
    assert validations(tmp_path / "run") == validations(folder)


def test_a_first_epoch_saves_nothing_more():
    run = resolve_run("pretrain", {"out": "x"})
    best = BestLoss(run, epoch_steps=100)
    assert not best.observe(50, {"val_loss": 3.0}, due=False)
    assert best.observe(60, {"val_loss": 3.5}, due=True)
    assert best.kept["step"] == 60
    assert best.observe(150, {"val_loss": 2.9}, due=False)
    assert not best.observe(200, {"val_loss": 2.95}, due=True)
    other = BestLoss(resolve_run("pretrain", {"eval": {"sequences": 7}}), epoch_steps=100)
    other.restore(best.state())
    assert not other.kept  # losses on other rows
    again = BestLoss(run, epoch_steps=100)
    again.restore(json.loads(json.dumps(best.state())))
    assert again.state() == best.state()


@pytest.mark.parametrize("patience", [0, 3])
def test_the_patience_is_named_to_who_has_none(patience):
    told = []
    run = resolve_run("pretrain", {"eval": {"patience": patience}})
    best = BestLoss(run, record=lambda incident: told.append(incident["note"]))
    for step, loss in ((5, 2.0), (10, 2.5)):
        best.observe(step, {"val_loss": loss}, due=True)
    assert ["eval.patience=N" in note for note in told] == [patience == 0]
