"""Planned memory of each strategy beside the tensors that two ranks hold."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penjing.base import config
from penjing.plan.memory import Target
from penjing.train.memory_trace.fit import layout_of
from penjing.train.memory_trace.trace import predict_memory
from penjing.workflows.train import resolve_run

WORDS = ["model=tiny", "compute.dtype=float32", "data.seq_len=128", "batch.size=8", "checkpoint.async=false"]
SMALL = ["batch.micro_size=2", "optimizer=adamw"]
# Short rows and a wide model: the peak is in the backward pass, among gathered blocks.
WIDE = ["model.hidden_size=256", "model.intermediate_size=704", "data.seq_len=64", "batch.micro_size=1"]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        pytest.param("fsdp2", [*SMALL, "compute.activation_checkpointing=block"], marks=pytest.mark.nightly),
        pytest.param("fsdp2", SMALL, marks=pytest.mark.nightly),
        pytest.param("fsdp2", [*WIDE, "optimizer=adamw"], marks=pytest.mark.nightly),
        pytest.param("fsdp2", ["batch.micro_size=2"], marks=pytest.mark.nightly),
        pytest.param("fsdp2", [*SMALL, "parallel.reshard=step"], marks=pytest.mark.nightly),
        pytest.param("fsdp2", [*WIDE, "optimizer=adamw", "parallel.reshard=step"], marks=pytest.mark.nightly),
        pytest.param("zero2", [*SMALL, "parallel.reshard=step"], marks=pytest.mark.nightly),
        pytest.param("zero2", [*WIDE, "optimizer=adamw", "parallel.reshard=step"], marks=pytest.mark.nightly),
        pytest.param("ddp", SMALL, marks=pytest.mark.nightly),
        *(
            pytest.param(stage, words, marks=pytest.mark.nightly)
            for stage in ("zero1", "zero2", "zero3")
            for words in (SMALL, [*WIDE, "optimizer=adamw"])
        ),
    ],
)
def test_ranks_hold_what_was_planned(tmp_path, strategy, words):
    if strategy.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip('needs pip install "penjing[deepspeed]"')
    words = [*WORDS, *words, f"parallel.strategy={strategy}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).with_name("rank_bytes.py")
    done = subprocess.run([*launcher, script, tmp_path, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    run = resolve_run("pretrain", config.parse_overrides(words))
    target = Target(kind="cpu", name="a CPU", memory_bytes=1 << 36)
    plan = predict_memory(run, target, layout=layout_of(run.parallel, 2), process_bytes=0)
    for rank in range(2):
        held = json.loads((tmp_path / f"{rank}.json").read_text())
        assert plan.peak_allocated_bytes == pytest.approx(held["peak"], rel=0.05)
        if strategy == "fsdp2":  # DDP keeps its buckets
            states = plan.waterfall["weights"] + plan.waterfall["optimizer state"]
            assert held["after"] == pytest.approx(states, rel=0.02), "between steps there is nothing else"


def test_what_lies_on_the_host_takes_no_memory_of_a_card():
    """With fsdp2 all states do; with ZeRO the weights stay."""

    def planned(strategy, offload):
        words = [*WORDS, *SMALL, f"parallel.strategy={strategy}", f"parallel.offload={offload}"]
        run = resolve_run("pretrain", config.parse_overrides(words))
        return predict_memory(run, Target(), layout=layout_of(run.parallel, 2))

    for strategy, stays in (("fsdp2", False), ("zero2", True)):
        here, there = planned(strategy, "false"), planned(strategy, "true")
        assert min(here.waterfall[name] for name in ("weights", "gradients", "optimizer state")) > 0
        assert not there.waterfall.keys() & {"optimizer state", "gradients"}  # only what takes room is listed
        assert there.waterfall.get("weights") == (here.waterfall["weights"] if stays else None)
        assert there.total_bytes < here.total_bytes
        assert any("in the host's memory" in note for note in there.notes)
