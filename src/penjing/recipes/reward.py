"""Learn a number for each answer from pairs. Run: penjing train reward init_from=runs/sft data.train=PAIRS.jsonl

Changes from dpo: the model gets a head of one number, read where the answer is all said (train/stages/reward.py), and
there is no reference; it is to judge and not to speak, so it may move far from its start: a rate of 3e-3. More pairs
help most; more than about five epochs of the same ones are memorized (docs/log.md).
"""

from __future__ import annotations

from penjing.base.config import Layer
from penjing.recipes.dpo import dpo


def reward() -> Layer:
    return {
        **dpo(),
        "stage": "reward",
        "out": "runs/reward",
        "epochs": 5,
        "objective": {"name": "reward"},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0},
    }
