"""Reinforce with a learned value. Run: penjing train ppo init_from=runs/sft data.train=PROMPTS.jsonl

Changes from grpo: answers are not compared with their siblings but with what a value head on the policy foresaw at each
token (generalised advantage estimation), so two answers to a prompt are enough and more prompts are taken at once; each
rollout is gone through twice, and the clipped ratio keeps the second time close to the first.
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
