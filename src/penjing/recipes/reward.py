"""Train a reward model on pairs. Run: penjing train reward init_from=runs/sft data.train=PAIRS.jsonl

Changes from dpo: the model gets a scalar head, read at the end of the answer (train/stages/reward.py), and there is no
reference model. It need not generate text any more, so it may move far from the initial weights: a rate of 3e-3. More
pairs help most; beyond about five epochs the model memorizes them (docs/log.md).
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
