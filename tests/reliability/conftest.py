"""Fixtures of the reliability tests: stages to train, and where their counts are written."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests here share reliability_harness.py

from reliability_harness import COMMON, SHAPE


@pytest.fixture(scope="session")
def stages(tmp_path_factory, server, toy):
    """(recipe, words) of a short run of every stage, without out=."""
    base = tmp_path_factory.mktemp("base") / "run"
    pretrain = [*SHAPE, *COMMON, f"data.train={toy / 'pretrain.jsonl'}", "data.seq_len=32"]
    status, _, said = server.run("pretrain", [*pretrain, "max_steps=8", f"out={base}"])
    assert status == 0, said
    begun = [*COMMON, f"init_from={base}"]
    chats = [*begun, f"data.train={toy / 'sft.jsonl'}", "data.seq_len=128"]
    return {
        "pretrain": ("pretrain", pretrain),
        "sft": ("sft", chats),
        "lora": ("lora", [*chats, "lora.rank=2", "lora.dropout=0.3"]),
        "dpo": ("dpo", [*begun, f"data.train={toy / 'dpo.jsonl'}", "data.seq_len=256"]),
        "grpo": (
            "grpo",
            [
                *begun, f"data.train={toy / 'rl.jsonl'}", "data.seq_len=256", "batch.size=2",
                "objective.rollout.num_generations=2", "objective.rollout.max_new_tokens=6",
                "objective.rollout.steps_per_rollout=2",
                "eval.at_start=false",
            ],
        ),
        "distill": ("distill", [*pretrain, f"objective.teacher={base}"]),
    }  # fmt: skip


@pytest.fixture
def copy_of(tmp_path):
    """Copies of a folder, one after the other."""
    made = []

    def copy(folder):
        made.append(tmp_path / f"copy{len(made)}")
        shutil.copytree(folder, made[-1], symlinks=True)
        return made[-1]

    return copy
