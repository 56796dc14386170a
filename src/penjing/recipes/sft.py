"""Teach a pretrained model to answer. Run: penjing train sft start=runs/pretrain data.train=CHATS.jsonl

Changes from pretrain: starts from a run; the data are conversations, and only what the assistant says is learned; AdamW
at a low rate; two epochs.
"""

from __future__ import annotations

from penjing.base.config import Layer
from penjing.recipes.pretrain import pretrain


def sft() -> Layer:
    base = pretrain()
    return {
        **base,
        "stage": "sft",
        "out": "runs/sft",
        "epochs": 2,
        "data": {"kind": "chats", "row_tokens": 1024, "min_row_tokens": 64},
        "batch": {"rows": 32, "min_steps": 100},
        "optimizer": {"kind": "adamw", "learning_rate": 2e-4, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_fraction": 0.02, "floor_fraction": 0.1},
    }
