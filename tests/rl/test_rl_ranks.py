"""Two processes learn what one does, to the last bit."""

from __future__ import annotations

import json

import pytest

TOOLS = (
    "objective.rollout.tools=calculator",
    "objective.rollout.max_turns=3",
    "objective.rollout.thinking=off",
    "data.seq_len=900",
)


@pytest.mark.parametrize(
    ("recipe", "tools"),
    [
        pytest.param("grpo", (), marks=pytest.mark.nightly),
        pytest.param("ppo", (), marks=pytest.mark.nightly),
        ("grpo", TOOLS),
    ],
)
def test_two_ranks_equal_one(penjing, small_run, toy, tmp_path, recipe, tools):
    short = [word for word in small_run if not word.startswith(("data.", "max_steps"))]
    base = tmp_path / "base"
    penjing("train", "sft", *short, f"data.train={toy / 'sft.jsonl'}", "data.seq_len=256", "max_steps=2", f"out={base}")
    words = [
        *[word for word in small_run if word.startswith(("compute", "eval.sequences"))],
        f"init_from={base}",
        f"data.train={toy / 'rl.jsonl'}",
        "data.seq_len=256",
        "batch.size=4",
        "max_steps=3",
        "seed=2",  # with 1 the answers to each prompt get one reward
        "eval.every=0",
        "objective.rollout.max_new_tokens=24",
        "objective.rollout.num_generations=3",
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
        same = ("reward", "reward_std", "answer_tokens", "entropy", "advantage_square", "grad_norm")
        assert {name: two[name] for name in same} == pytest.approx({name: one[name] for name in same}, rel=1e-6)
        assert one["grad_norm"] > 0.1
