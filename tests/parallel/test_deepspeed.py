"""DeepSpeed's ZeRO learns what one process learns, and its checkpoints are those of any strategy.

Needs the extra `deepspeed`, which `.ci/run` installs for this file. Without it what trains is skipped.
"""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from short_runs import cut_back, newest

from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.parallel import deepspeed
from penjing.parallel.ds_config import check_file, engine_config
from penjing.workflows.train import resolve_run

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs pip install "penjing[deepspeed]"; .ci/run tests it'
)
GEOMETRY = SimpleNamespace(global_size=8, micro_size=2, accumulation=2, world=2)
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# As Hugging Face's documentation has it, but for the schedule.
THEIRS = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "reduce_bucket_size": "auto",
        "overlap_comm": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}


@pytest.fixture
def config_of(tmp_path):
    """The engine's configuration for a ds_config.json."""

    def make(theirs, *words):
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps(theirs))
        words = ["optimizer.name=adamw", "compute.dtype=float32", *words, f"parallel.ds_config={file}"]
        run = resolve_run("pretrain", parse_overrides(["data.train=x", "parallel.strategy=zero2", *words]))
        return engine_config(run, GEOMETRY, 2)

    return make


def test_a_file_that_agrees_is_passed_on_and_auto_is_filled(config_of):
    config = config_of(THEIRS)
    assert config["zero_optimization"]["allgather_bucket_size"] == 2e8
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["reduce_bucket_size"] == 1 << 24
    assert config["steps_per_print"] == 2000
    assert "auto" not in json.dumps(config)
    assert not {"fp16", "bf16", "optimizer", "gradient_clipping"} & config.keys()  # the loop does these
    assert config_of(THEIRS | {"bf16": {"enabled": True}}, "compute.dtype=bfloat16")
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert config_of({"zero_optimization": offload}, "parallel.offload=true")["zero_optimization"]["offload_optimizer"]


# What is refused only once the data are read: sizes of batches.
LATE = ("train_batch_size", "gradient_accumulation_steps")


@pytest.fixture
def refused_early(tmp_path):
    """Whether a file is refused before data are read."""

    def refused(theirs):
        file = tmp_path / "early.json"
        file.write_text(json.dumps(theirs))
        words = ["data.train=x", "parallel.strategy=zero2", "optimizer.name=adamw", "compute.dtype=float32"]
        try:
            check_file(resolve_run("pretrain", parse_overrides([*words, f"parallel.ds_config={file}"])), 2)
        except UserError:
            return True
        return False

    return refused


def test_what_is_decided_later_is_not_refused_early(refused_early):
    assert not refused_early({"bf16": {"enabled": False}, "train_batch_size": 7})


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("train_batch_size", 16, "batch.size=8"),
        ("gradient_accumulation_steps", 4, "batch.micro_size=2"),
        ("gradient_clipping", 0.5, "max_grad_norm=1.0"),
        ("bf16.enabled", True, "compute.dtype=float32"),
        ("fp16.enabled", True, "compute.dtype=float32"),
        ("optimizer.type", "Lamb", "optimizer.name=adamw"),
        ("optimizer.params.lr", 0.5, "optimizer.learning_rate=0.0005"),
        ("optimizer.params.betas", [0.9, 0.999], "beta2"),
        ("scheduler.type", "OneCycle", "schedule.name="),
        ("scheduler.params.warmup_num_steps", 3, "penjing decides"),
        ("zero_optimization.stage", 3, "parallel.strategy=zero2"),
        ("zero_optimization.offload_optimizer.device", "cpu", "parallel.offload=false"),
        ("hybrid_engine.enabled", True, "penjing decides"),
    ],
)
def test_a_field_that_contradicts_a_setting_is_named_with_both(config_of, refused_early, field, theirs, ours):
    *groups, name = field.split(".")
    tree = {name: theirs}
    for group in reversed(groups):
        tree = {group: tree}
    with pytest.raises(UserError) as error:
        config_of(tree)
    assert refused_early(tree) == (field not in LATE)
    assert error.value.where.endswith(f": {field}")
    assert error.value.got == theirs
    assert ours in error.value.wanted


def test_a_file_that_is_no_object_is_refused(config_of):
    with pytest.raises(UserError, match="not a JSON object"):
        config_of([1])


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r'pip install "penjing\[deepspeed\]"'):
        deepspeed.Zero2(torch.device("cpu"))


@pytest.fixture
def words(small_run):
    """A run with uneven passes of validation, samples, and two passes of a step on each of two ranks."""
    more = ["optimizer.name=adamw", "batch.micro_size=2", "eval.sequences=5", "checkpoint.keep_last=9"]
    return [*small_run, *more, "sample.every=6", "sample.max_new_tokens=5", 'sample.prompts=["a"]']


def position_of(folder):
    return json.loads((newest(folder) / "state.json").read_text())["source"]


CHAIN = (("ddp", 2), ("fsdp2", 4), ("zero2", 2), ("zero3", 2), ("zero1", 4), ("zero3", 4), ("single", 1))


@needs_deepspeed
@pytest.mark.parametrize("chain", [CHAIN[2:4], pytest.param(CHAIN, marks=pytest.mark.nightly)])
def test_a_chain_of_strategies_gives_the_uninterrupted_runs_losses(penjing, words, losses, outcome, tmp_path, chain):
    """Losses, and with them the order of samples; the last position in the data too."""
    folder, words = tmp_path / "whole", [*words, "checkpoint.every=1", "checkpoint.keep_last=12"]
    penjing("train", "pretrain", *words, f"out={folder}")
    expected, end, position = losses(folder), outcome(folder), position_of(folder)
    for number, (strategy, ranks) in enumerate(chain, start=1):
        before, folder = folder, tmp_path / f"{number}-{strategy}"
        cut_back(before, folder, number)
        words_now = [*words, f"parallel.strategy={strategy}", f"out={folder}"]
        done = penjing("train", "pretrain", *words_now, ranks=ranks)
        assert f"continues after step {number}" in done.stdout
        assert "warning: `torch" not in done.stderr
        assert losses(folder) == pytest.approx(expected, abs=1e-6)
        assert position_of(folder) == position
    assert outcome(folder)["val_loss"] == pytest.approx(end["val_loss"], abs=1e-6)


STEPS = """
import sys
from types import SimpleNamespace

import torch
import torch.distributed as distributed
from small_models import small_model

from penjing.base.config import parse_overrides
from penjing.model.score import CrossEntropy
from penjing.optim.adamw import AdamW
from penjing.parallel.base import make_strategy
from penjing.parallel.single import Single
from penjing.workflows.train import resolve_run

words = ["data.train=x", "optimizer.name=adamw", "compute.dtype=float32", *sys.argv[2:]]
run = resolve_run("pretrain", parse_overrides(words))
geometry = SimpleNamespace(global_size=8, micro_size=2, accumulation=2, world=2)
ids_BT = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(1))
score = lambda rows: CrossEntropy(rows.roll(-1, 1).flatten(), torch.ones(rows.numel()))


def train(strategy, model, bad=None):
    call = strategy.wrap(model)
    optimizers = strategy.adopt(AdamW(learning_rate=1e-2, eps=1e-3).build(model), run, geometry)
    kept, norms = [], []
    for step in range(4):
        mine = ids_BT[strategy.rank :: strategy.world]
        for number in range(2):
            rows = mine[number :: 2]
            with strategy.micro_step(last=number == 1):
                total = call(rows, torch.zeros_like(rows), score=score(rows))
                if step == bad and strategy.rank == strategy.world - 1:
                    total = torch.where(torch.tensor(True), total, total) + torch.tensor(torch.nan)  # no gradient
                strategy.backward(total / ids_BT.numel())
        loss = torch.tensor(torch.nan if step == bad else 1.0)
        before = strategy.full_state(model.state_dict())
        before = {name: value.clone() for name, value in before.items()}
        norm, flag = strategy.step(optimizers, 0.5, loss)
        assert bool(flag) == (step == bad), (step, flag)
        norms.append(float(norm))
        after = strategy.full_state(model.state_dict())
        same = all(torch.equal(value, before[name]) for name, value in after.items())
        assert strategy.rank or same == (step == bad), step
    return strategy.full_state(model.state_dict()), optimizers, norms


def whole_copy(state):
    return {name: value.clone() for name, value in state.items()}


make = lambda: small_model(noise=0, vocab_size=64, hidden_size=64, head_dim=16, intermediate_size=128)
expected, _, norms = train(Single(torch.device("cpu")), make(), bad=2)
for word in sys.argv[1].split(","):
    name, _, reshard = word.partition(":")
    strategy, model = make_strategy("cpu", name), make()
    strategy.reshard = reshard or "pass"
    numbers = sum(parameter.numel() for parameter in model.parameters())
    weights, optimizers, theirs = train(strategy, model, bad=2)
    if strategy.rank == 0:
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        assert theirs.pop(2) == float("inf")  # the bad step
        torch.testing.assert_close(theirs, norms[:2] + norms[3:], rtol=1e-6, atol=0)
    (adamw,) = optimizers
    states = adamw.zero.optimizer.state.values()
    moments = sum(state[key].numel() for state in states for key in ("exp_avg", "exp_avg_sq"))
    assert abs(moments - numbers) < 0.01 * numbers, (name, moments, numbers)  # two moments of half the numbers
    if name == "zero3":
        held = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
        assert abs(held - numbers / 2) < 0.01 * numbers
        assert all(parameter.numel() == 0 for parameter in model.parameters())
    # Loaded state is the saved one, whole or in parts; so are loaded weights, which then also are what is trained.
    parts = adamw.state_dict()
    whole = strategy.full_state([parts])
    box = [whole]
    distributed.broadcast_object_list(box, src=0)
    for state in (parts, box[0][0], {"state": {}, "param_groups": parts["param_groups"]}, box[0][0]):
        adamw.load_state_dict(state)
    again = strategy.full_state([adamw.state_dict()])
    if strategy.rank == 0:
        for number, values in whole[0]["state"].items():
            for key, value in values.items():
                assert torch.equal(value, again[0]["state"][number][key]), (number, key)
    start = make().state_dict()
    with strategy.loading():
        model.load_state_dict(start)
    loaded = strategy.full_state(model.state_dict())
    assert strategy.rank or all(torch.equal(value, start[key]) for key, value in loaded.items())
    for _ in range(2):  # before the second DeepSpeed has forgotten the order of a pass, and would compare it
        with strategy.gathered(model):
            if strategy.rank == 0:  # alone
                model.hidden(ids_BT[:1], torch.zeros(1, 32, dtype=torch.long))
                model(ids_BT[:1], torch.zeros(1, 32, dtype=torch.long), score=score(ids_BT[:1]))
    strategy.close()
"""


@needs_deepspeed
@pytest.mark.parametrize("offload", [False, True])
def test_steps_states_and_bytes_of_each_stage(tmp_path, offload):
    """Two ranks step as one process does, skip a step whose loss is NaN, keep half, save and load whole tensors."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    stages = "zero2,zero2:step" if offload else "zero1,zero2,zero2:step,zero3"
    words = [stages, f"parallel.strategy={stages[:5]}", f"parallel.offload={str(offload).lower()}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*TWO_RANKS, script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
