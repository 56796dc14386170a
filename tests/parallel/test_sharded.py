"""A strategy whose ranks hold parts of the weights is one file and one line: FSDP2 learns what one process learns.

It checkpoints, resumes, validates uneven batches and samples through the methods of `Strategy` that ask all ranks.
"""

import subprocess
import sys

import pytest
from short_runs import cut_back

STRATEGY = """
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from penjing.kernels import ops
from penjing.parallel.base import Strategy
from penjing.parallel.ddp import DataParallel


class Sharded(DataParallel):
    shards = frozenset({"weights", "gradients", "optimizer state"})

    def wrap(self, model):
        mesh = distributed.init_device_mesh(self.device.type, (self.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self._model = fully_shard(model, mesh=mesh)
        return self._model

    def micro_step(self, *, last):
        self._model.set_requires_gradient_sync(last)
        return nullcontext()

    def clip(self, max_norm):
        gradients = [p.grad.to_local() for p in self._model.parameters() if p.grad is not None]
        norm = self.all_reduce(ops.global_norm(gradients).double().square()).sqrt().float()
        for gradient in gradients if max_norm > 0 else ():
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    def full_state(self, state):
        return tree_map_only(DTensor, lambda part: part.full_tensor(), state)

    def place(self, full, like):
        sharded = isinstance(like, DTensor)
        return distribute_tensor(full, like.device_mesh, like.placements) if sharded else full

    @contextmanager
    def gathered(self, model):
        parts = [part for part in self._model.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.unshard()
        yield
        for part in parts:
            part.reshard()
"""
MAIN = """
import sys
import penjing.parallel
penjing.parallel.__path__.append({folder!r})
penjing.parallel.STRATEGIES["sharded"] = "penjing.parallel.sharded:Sharded"
from penjing.cli import app
app(sys.argv[1:])
"""


@pytest.fixture
def train(tmp_path, small_run, penjing):
    """Trains by `single` in one process, or by `sharded` in two."""
    (tmp_path / "sharded.py").write_text(STRATEGY)
    (tmp_path / "main.py").write_text(MAIN.format(folder=str(tmp_path)))
    words = [
        "optimizer.name=adamw",
        "max_steps=4",
        "eval.every=2",
        "eval.sequences=5",
        "checkpoint.every=2",
        "batch.micro_size=2",
    ]
    words = [*small_run, *words, "sample.every=2", "sample.max_new_tokens=5", 'sample.prompts=["a"]']

    def run(strategy, out):
        command = ["train", "pretrain", *words, f"parallel.strategy={strategy}", f"out={tmp_path / out}"]
        if strategy == "single":
            penjing(*command)
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            done = subprocess.run(
                [*launcher, tmp_path / "main.py", *command], capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stdout + done.stderr
        return tmp_path / out

    return run


def test_it_learns_saves_resumes_validates_and_samples_as_one_process_does(train, losses, outcome, tmp_path):
    one, two = train("single", "one"), train("sharded", "two")
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert outcome(two)["val_loss"] == pytest.approx(outcome(one)["val_loss"], abs=1e-5)
    assert (two / "samples.jsonl").read_text().count("\n") == (one / "samples.jsonl").read_text().count("\n") > 0
    for source, strategy in ((two, "single"), (one, "sharded")):
        cut_back(source, tmp_path / strategy, 2)
        assert losses(train(strategy, strategy)) == pytest.approx(losses(one), abs=1e-5)
