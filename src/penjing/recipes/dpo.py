"""Teach a model which of two answers is better. Run: penjing train dpo init_from=runs/sft data.train=PAIRS.jsonl

Changes from sft: the data are pairs of answers; the loss compares them under the model and under the one it began with
(objective.loss=ipo, simpo, orpo, kto ... are the same recipe); few steps are needed; no weight decay, which would
pull away from the start. Held-out pairs are judged before the first step too, and the questions the model is known by
are asked before and after (`eval.questions`): pairs show what they compare, and nothing of what they do not.

The rate is a quarter of SFT's. At 3e-4 the quickstart's model ordered more pairs and lost its tool calls, of which the
pairs have none: 40 of 40 right before, 1 after; an NLL term of the chosen answers did not keep them
(docs/methods/dpo.md). A larger model wants a smaller rate.
"""

from __future__ import annotations

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
