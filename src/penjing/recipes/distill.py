"""Distil a larger model into a smaller one.
Run: penjing train distill objective.teacher=runs/large data.train=TEXT.jsonl model=tiny

Changes from pretrain: the target at each position is the teacher's full distribution; a tenth of the loss is still
cross-entropy on the data. The student is newly initialised, with the teacher's tokenizer; init_from=RUN distils into an
existing model, so the optimizer is AdamW with a cosine schedule. For conversations: data.format=chats; the student can
also sample the answers (objective.mode=on_policy objective.ce_weight=0). Also evaluates held-out rows before the first
step. For the quickstart's model: penjing train tiny_distill.
"""

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
