"""Where ranks hold parts of the weights, they learn what one process learns.

They save, resume, validate uneven batches and sample through the methods of `Strategy` that ask all ranks.
"""

import os
import subprocess
import sys

import pytest
from short_runs import cut_back


@pytest.fixture
def train(tmp_path, small_run, penjing):
    words = ["max_steps=4", "eval.every=2", "eval.sequences=5", "checkpoint.every=2", "batch.micro_size=2"]
    words = [*small_run, *words, "sample.every=2", "sample.max_new_tokens=5", 'sample.prompts=["a"]']

    def run(out, *more, ranks=1, strategy="auto", recipe="pretrain"):
        command = ["train", recipe, *words, *more, f"parallel.strategy={strategy}", f"out={tmp_path / out}"]
        penjing(*command, ranks=ranks)
        return tmp_path / out

    return run


PARTS = ("checkpoint.parts_from_gib=0",)
WIDE = ("model.hidden_size=64", "model.intermediate_size=128", "model.head_dim=32")  # states in few bits: from 4096 on


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [
        ((), 1e-6),
        pytest.param((*WIDE, "optimizer.state_dtype=bfloat16"), 0.02, marks=pytest.mark.nightly),
        pytest.param((*WIDE, "optimizer.state_dtype=int8"), 0.02, marks=pytest.mark.nightly),
        pytest.param((*WIDE, "optimizer.name=adamw", "optimizer.state_dtype=int8"), 0.02, marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_under_any_strategy_with_any_number_of_ranks(train, losses, tmp_path, more, tolerance):
    """States in few bits are rounded in other places where a rank has a part. Each rank saves what it holds."""
    more = (*more, "checkpoint.every=1", "checkpoint.keep_last=9", "max_steps=5", "eval.every=0", *PARTS)
    one = train("one", *more)
    before = one
    chain = (("ddp", 2), ("fsdp2", 4), ("hsdp", 4), ("single", 1))
    for step, (strategy, ranks) in enumerate(chain, start=1):
        cut_back(before, tmp_path / strategy, step)
        small = ("batch.micro_size=1",) if ranks == 4 else ()
        before = train(strategy, *more, *small, ranks=ranks, strategy=strategy)
        assert losses(before) == pytest.approx(losses(one), abs=tolerance)


def test_weights_can_lie_in_the_memory_of_the_host(train, losses):
    one = train("one", "compute.dtype=float32")
    two = train("two", "parallel.offload=true", ranks=2, strategy="fsdp2")
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)


def test_it_learns_saves_resumes_validates_and_samples_as_one_process_does(train, losses, outcome, tmp_path):
    start = "embedding_init=cooccurrence"
    one, two = train("one", start), train("two", start, ranks=2, strategy="fsdp2")
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
    assert outcome(two)["val_loss"] == pytest.approx(outcome(one)["val_loss"], abs=1e-6)
    assert (two / "samples.jsonl").read_text().count("\n") == (one / "samples.jsonl").read_text().count("\n") > 0
    assert 'reshard = "step"' in (two / "run.toml").read_text(), "weights and gradients of so few are kept whole"
    for source, ranks, strategy, more in ((two, 1, "single", ()), (one, 2, "fsdp2", ("parallel.reshard=pass",))):
        cut_back(source, tmp_path / strategy, 2)
        again = train(strategy, start, *more, ranks=ranks, strategy=strategy)
        assert losses(again) == pytest.approx(losses(one), abs=1e-6)


@pytest.mark.nightly
def test_large_models_are_saved_by_each_rank(train, losses, penjing, tmp_path):
    """Four ranks write what they hold; any number of them reads it, and one exports it."""
    more = ("checkpoint.every=1", "checkpoint.keep_last=9", "eval.every=0", *PARTS)
    one, small = train("one", *more), "batch.micro_size=1"
    assert (one / "checkpoints/step-00000004/model.safetensors").is_file()
    before = train("four", *more, small, ranks=4, strategy="fsdp2")
    assert losses(before) == pytest.approx(losses(one), abs=1e-6)
    for step, (writers, strategy, ranks) in enumerate(((4, "hsdp", 4), (2, "fsdp2", 2), (2, "single", 1)), start=1):
        files = list(before.glob(f"checkpoints/step-0000000{step}/model-*.safetensors"))
        sizes = [file.stat().st_size for file in files]
        assert len(sizes) == writers
        assert max(sizes) < 1.2 * min(sizes), "not each its part"
        cut_back(before, tmp_path / strategy, step)
        before = train(strategy, *more, *([small] if ranks == 4 else []), ranks=ranks, strategy=strategy)
        assert losses(before) == pytest.approx(losses(one), abs=1e-6)
    assert not list(before.glob("checkpoints/.*")), "something was left aside"
    penjing("export", "hf", tmp_path / "four", tmp_path / "whole")
    assert "held-out loss" in (tmp_path / "whole/README.md").read_text(), "the weights are not those of the outcome"


SCARCE = """
import sys

from rich.console import Console

from penjing.base.config import parse_overrides
from penjing.devices import host
from penjing.plan.memory import MemoryPlan
from penjing.train.memory_trace import fit
from penjing.workflows.train import execute, resolve_run

GIB = 1 << 30


def predict(run, target, *, micro_size, layout):
    total = {"ddp": 8, "fsdp2": 3}[layout.strategy] * GIB
    peak = {"peak_allocated_bytes": total, "peak_reserved_bytes": total, "total_bytes": total}
    return MemoryPlan(**peak, waterfall={}, peak_at="", peak_line="", peak_phase="")


fit.trace.predict_memory, fit.ROUGH_FACTOR = predict, 1e9
host.available_bytes = lambda processes=1: 4 * GIB
execute(resolve_run("pretrain", parse_overrides(sys.argv[1:])), Console())
"""


@pytest.mark.nightly
def test_ranks_share_the_weights_where_the_whole_does_not_fit(tmp_path, small_run, train, losses):
    """A plan says 8 GiB with ddp and 3 with fsdp2, and 4 are free."""
    one, two = train("one"), tmp_path / "two"
    words = [*small_run, "max_steps=4", "eval.every=2", "eval.sequences=5", "batch.micro_size=2", f"out={two}"]
    script = tmp_path / "scarce.py"
    script.write_text(SCARCE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*launcher, script, *words], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in (two / "run.toml").read_text().splitlines() if "ddp takes 8.00 GiB" in line)
    assert "fsdp2" in line
    assert losses(two) == pytest.approx(losses(one), abs=1e-6)
