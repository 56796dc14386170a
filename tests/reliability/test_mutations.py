"""The tests bite: a run that forgets any one part of its state is noticed by the comparison the kill tests make."""

import shutil

import pytest
from reliability_harness import state_of
from small_models import make_checkpointer

# (stage, lines that make a resumed run forget one part of its state)
FORGETS = {
    "weights": ("pretrain", "import penjing.train.build_model as m\nm.load_weights = lambda *given: None"),
    "optimizer": ("pretrain", "import penjing.train.checkpointer as m\nm.restore_optimizers = lambda *given: None"),
    "one of the optimizer's moments": (
        "pretrain",
        "import torch, penjing.train.checkpointer as m\n"
        "real = m.restore_optimizers\n"
        "def forget(optimizers, checkpoint):\n"
        "    real(optimizers, checkpoint)\n"
        "    for optimizer in optimizers:\n"
        "        for state in getattr(optimizer, 'state', {}).values():\n"
        "            for name in ('exp_avg', 'momentum'):\n"
        "                if name in state: state[name].zero_()\n"
        "m.restore_optimizers = forget",
    ),
    "loader": (
        "pretrain",
        "from penjing.train.oom_recovery import ResizableBatchSource as It\nIt.restore = lambda self, state: None",
    ),
    "loader of conversations": (
        "sft",
        "from penjing.train.oom_recovery import ResizableBatchSource as It\nIt.restore = lambda self, state: None",
    ),
    "loader of pairs": (
        "dpo",
        "from penjing.train.oom_recovery import ResizableBatchSource as It\nIt.restore = lambda self, state: None",
    ),
    "loader, off by one step": (
        "pretrain",
        "from penjing.train.oom_recovery import ResizableBatchSource\n"
        "real = ResizableBatchSource.restore\n"
        "def forget(self, state):\n"
        "    real(self, {'next_row': state['next_row'] + 4})\n"
        "ResizableBatchSource.restore = forget",
    ),
    "random numbers": (
        "lora",
        "from penjing.model.lora import Adapter\nAdapter.set_extra_state = lambda self, state: None",
    ),
    "how many random numbers were drawn": (
        "lora",
        "from penjing.model.lora import Adapter\n"
        "def forget(self, state):\n"
        "    self.seed = int(state[0])\n"
        "Adapter.set_extra_state = forget",
    ),
    "schedule": (
        "pretrain",
        "import penjing.train.loop as m\n"
        "real, first = m.step, []\n"
        "def forget(parts, index):\n"
        "    first[:] = first or [index]\n"
        "    return real(parts, index - first[0])\n"
        "m.step = forget",
    ),
    "the answers of a round under way": (
        "grpo",
        "from penjing.rl.rollout_source import RolloutSource\n"
        "real = RolloutSource.restore\n"
        "RolloutSource.restore = lambda self, state: real(self, {**state, 'round': '', 'unit': 0})",
    ),
    "sums since the last logged step": (
        "pretrain",
        "from penjing.train.loop import TrainState\n"
        "real = TrainState.restore\n"
        "def forget(self, state, strategy):\n"
        "    return real(self, {**state, 'sums': {}, 'units': 0.0}, strategy)\n"
        "TrainState.restore = forget",
    ),
    "tokens counted": (
        "pretrain",
        "from penjing.train.throughput import Meter\nMeter.restore = lambda self, state: None",
    ),
    "recent losses": (
        "pretrain",
        "from penjing.train.nonfinite_guard import NonFiniteGuard\nNonFiniteGuard.restore = lambda self, state: None",
    ),
}
AT = 3  # the step whose checkpoint is gone on from; in the middle of a round of two steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory, server, stages):
    made = {}

    def run(stage):
        if stage not in made:
            folder = tmp_path_factory.mktemp("whole") / "run"
            recipe, words = stages[stage]
            # Logged at the end only, so that sums are under way in the checkpoint.
            words = [*words, "checkpoint.keep_last=9", "log.every=100"]
            status, _, said = server.run(recipe, [*words, f"out={folder}"])
            assert status == 0, said
            made[stage] = (folder, recipe, words, state_of(folder, every=True))
        return made[stage]

    return run


def resumed(server, whole, tmp_path, **how):
    """The states of every checkpoint of a run that was cut back to step AT and went on; None if it could not."""
    folder, recipe, words, _ = whole
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    for checkpoint in (copied / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > AT:
            shutil.rmtree(checkpoint)
    status, _, _ = server.run(recipe, [*words, f"out={copied}"], **how)
    return state_of(copied, every=True) if status == 0 else None


@pytest.mark.parametrize("stage", sorted({stage for stage, _ in FORGETS.values()}))
def test_a_run_that_forgets_nothing_is_the_same(tmp_path, server, whole, stage):
    assert resumed(server, whole(stage), tmp_path) == whole(stage)[3]


@pytest.mark.parametrize("part", FORGETS)
def test_a_run_that_forgets_is_noticed(tmp_path, server, whole, count, part):
    stage, lines = FORGETS[part]
    forgot = tmp_path / "forgot"  # there once all lines have run
    lines += f"\nopen({str(forgot)!r}, 'w').close()"
    assert resumed(server, whole(stage), tmp_path, before=lines) != whole(stage)[3]
    assert forgot.exists()
    count("parts of the state whose loss is noticed", 1)


def test_a_loss_scaler_would_be_noticed(tmp_path):
    """No strategy here has one on a CPU: what is registered in `Checkpointer.stateful` comes back, and only that."""
    import torch

    from penjing.checkpoint.load import newest

    class Scaler:
        def __init__(self):
            self.scale, self.good = 65536.0, 0

        def state(self):
            return {"scale": self.scale, "good": self.good}

        def restore(self, state):
            self.scale, self.good = state["scale"], state["good"]

    def keeper(stateful):
        return make_checkpointer(tmp_path, torch.nn.Linear(2, 2), stateful=stateful)

    before, after = Scaler(), Scaler()
    before.scale, before.good = 1024.0, 77
    assert keeper({"scaler": before}).save({"step": 1}, True)
    keeper({"scaler": after}).restore(newest(tmp_path), optimizers=True)
    assert vars(after) == vars(before)
    forgotten = Scaler()
    keeper({}).restore(newest(tmp_path), optimizers=True)
    assert vars(forgotten) != vars(before)
