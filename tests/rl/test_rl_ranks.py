"""Two processes learn what one does."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_two_ranks_equal_one(penjing, small_run, toy, tmp_path, recipe):
    short = [word for word in small_run if not word.startswith(("data.", "steps"))]
    base = tmp_path / "base"
    penjing("train", "sft", *short, f"data.train={toy / 'sft.jsonl'}", "data.row_tokens=256", "steps=2", f"out={base}")
    words = [
        *[word for word in small_run if word.startswith(("compute", "validate.rows"))],
        f"start={base}",
        f"data.train={toy / 'rl.jsonl'}",
        "data.row_tokens=256",
        "batch.rows=4",
        "steps=3",
        "validate.every=3",
        "objective.rollout.max_tokens=8",
        "objective.rollout.answers=3",
        "objective.rewards=repetition,length",
        "objective.kl_weight=0.05",
        "optimizer.kind=muon",
    ]
    found = []
    for name, launcher in (("one", ()), ("two", ("torch.distributed.run", "--nproc-per-node=2", "--master-port=0"))):
        out = tmp_path / name
        penjing("train", recipe, *words, f"out={out}", launcher=launcher)
        newest = sorted((out / "checkpoints").iterdir())[-1]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        figures = [line for line in lines if "validation_reward" in line][-1]
        found.append((safetensors.torch.load_file(newest / "model.safetensors"), figures))
    (one, first), (two, second) = found
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
    for name in ("validation_reward", "validation_answer_tokens"):
        assert second[name] == pytest.approx(first[name], rel=1e-3)
