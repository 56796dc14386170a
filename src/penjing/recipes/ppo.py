"""Reinforce with a learned value. Run: penjing train ppo start=runs/sft data.train=PROMPTS.jsonl

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
        "objective": {"kind": "policy", "loss": "ppo", "rollout": {"answers": 2, "repeats": 2}},
        "batch": {"rows": 64},
    }
