"""Preference optimisation on pairs of answers (DPO). Run: penjing train dpo init_from=runs/sft data.train=PAIRS.jsonl

Changes from sft: the data are pairs of answers. The loss compares them under the model and under the initial model
(objective.loss=ipo, simpo, orpo, kto ... use the same recipe). Few steps are needed. No weight decay, which would pull
away from the initial weights. Also evaluates held-out pairs before the first step, and asks the model's questions
before and after (`eval.questions`), because pairs do not measure skills that they do not contain.

The learning rate is a quarter of SFT's. At 3e-4 the quickstart's model ranked more pairs correctly but lost its tool
calls, which the pairs lack: 40 of 40 right before, 1 after; an NLL term on the chosen answers did not prevent this
(docs/methods/dpo.md). A larger model needs a smaller rate.
"""

from penjing.base.config import Layer
from penjing.recipes.sft import sft


def dpo() -> Layer:
    return {
        **sft(),
        "stage": "dpo",
        "out": "runs/dpo",
        "epochs": 3,
        "objective": {"name": "preference", "loss": "dpo"},
        "data": {"format": "preferences", "seq_len": 1024, "val_fraction": 0.1},
        "batch": {"size": 32, "min_steps": 100},
        "optimizer": {"name": "adamw", "learning_rate": 5e-5, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup_ratio": 0.1, "min_lr_ratio": 0.1},
        "eval": {"every": 50, "at_start": True},
    }


def reward() -> Layer:
    """Train a reward model on pairs. Run: penjing train reward init_from=runs/sft data.train=PAIRS.jsonl

    Changes from dpo: the model gets a scalar head, read at the end of the answer (train/stages/reward.py), and there is
    no reference model. It need not generate text any more, so it may move far from the initial weights: a rate of 3e-3.
    More pairs help most; beyond about five epochs the model memorizes them (docs/log.md).
    """
    return {
        **dpo(),
        "stage": "reward",
        "out": "runs/reward",
        "epochs": 5,
        "objective": {"name": "reward"},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0},
    }
