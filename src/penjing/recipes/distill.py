"""Teach a model to predict as a larger one does.
Run: penjing train distill objective.teacher=runs/large data.train=TEXT.jsonl model=tiny

Changes from pretrain: each position's target is the teacher's whole prediction beside the token that came; a tenth of
the loss is still the data's own. The student begins from nothing with the teacher's tokenizer; init_from=RUN distils
into one that is there, and so it is AdamW and a cosine. On conversations: data.format=chats, which may also be answered
by the student itself (objective.mode=on_policy objective.ce_weight=0). Held-out rows are judged before the first step
too. For the quickstart's model: penjing train tiny_distill.
"""

from __future__ import annotations

from penjing.base.config import Layer
from penjing.recipes.pretrain import pretrain


def distill() -> Layer:
    return {
        **pretrain(),
        "stage": "distill",
        "out": "runs/distill",
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_ratio": 0.02, "min_lr_ratio": 0.1},
        "objective": {"name": "distill", "ce_weight": 0.1},
        "eval": {"at_start": True},
    }
