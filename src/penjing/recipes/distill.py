"""Teach a model to predict as a larger one does.
Run: penjing train distill objective.teacher=runs/large data.train=TEXT.jsonl model=tiny

Changes from pretrain: each position's target is the teacher's whole prediction beside the token that came; a tenth of
the loss is still the data's own. The student begins from nothing with the teacher's tokenizer; start=RUN distils into
one that is there, and so it is AdamW and a cosine. On conversations: data.kind=chats, which may also be answered by the
student itself (objective.mode=on_policy objective.data_weight=0). Held-out rows are judged before the first step too.
For the quickstart's model: penjing train tiny_distill.
"""

from __future__ import annotations

from penjing.base.config import Layer
from penjing.recipes.pretrain import pretrain


def distill() -> Layer:
    return {
        **pretrain(),
        "stage": "distill",
        "out": "runs/distill",
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_fraction": 0.02, "floor_fraction": 0.1},
        "objective": {"kind": "distill", "data_weight": 0.1},
        "validate": {"before": "yes"},
    }
