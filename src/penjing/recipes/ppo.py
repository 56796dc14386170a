"""Reinforcement learning with a value head (PPO). Run: penjing train ppo init_from=runs/sft data.train=PROMPTS.jsonl

Changes from grpo: the baseline is not the mean of the group but the prediction of a value head at each token
(generalised advantage estimation). So two answers per prompt are enough, and a batch has more prompts. Each rollout is
used for two epochs; the clipped ratio limits how far the second moves from the first.
"""

from __future__ import annotations

from penjing.base.config import Layer
from penjing.recipes.grpo import grpo


def ppo() -> Layer:
    return {
        **grpo(),
        "stage": "ppo",
        "out": "runs/ppo",
        "objective": {"name": "policy", "loss": "ppo", "rollout": {"num_generations": 2, "num_epochs": 2}},
        "batch": {"size": 64},
    }
