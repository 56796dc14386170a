"""Two processes learn what one does, to the last bit."""

from __future__ import annotations

import json

import pytest

TOOLS = (
    "objective.rollout.tools=calculator",
    "objective.rollout.max_turns=3",
    "objective.rollout.thinking=off",
    "data.row_tokens=900",
)


@pytest.mark.parametrize(("recipe", "tools"), [("grpo", ()), ("ppo", ()), ("grpo", TOOLS)])
def test_two_ranks_equal_one(penjing, small_run, toy, tmp_path, recipe, tools):
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
        "validate.every=0",
        "objective.rollout.max_tokens=24",
        "objective.rollout.answers=3",
        "objective.rewards=repetition",
        "objective.reward.repeated_words=1",
        "optimizer.learning_rate=1e-4",
        *tools,
    ]
    weights, found = [], []
    for name, ranks in (("one", 1), ("two", 2)):
        out = tmp_path / name
        penjing("train", recipe, *words, f"out={out}", ranks=ranks)
        weights.append(json.loads((out / "outcome.json").read_text())["weights_sha256"])
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found.append([line for line in lines if "reward" in line])
    assert weights[0] == weights[1]
    for one, two in zip(*found, strict=True):
        same = ("reward", "reward_spread", "answer_tokens", "entropy_nats", "advantage_square", "gradient_norm")
        assert {name: two[name] for name in same} == pytest.approx({name: one[name] for name in same}, rel=1e-6)
        assert one["gradient_norm"] > 0.1
