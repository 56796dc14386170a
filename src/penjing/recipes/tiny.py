"""The quickstart's two stages: a 1M-parameter model in a few minutes on two CPU cores. Run: make quickstart

Changes from pretrain and sft: the `tiny` shape; Muon, which finds copying from context several times sooner than
AdamW at this size; a straight fall of the learning rate over the last half; short rows, as the stories are short.
"""

from __future__ import annotations

from penjing.base.config import Layer

PRETRAIN_STEPS = 500
SFT_STEPS = 220


def tiny() -> Layer:
    return {
        "stage": "tiny",
        "out": "runs/tiny",
        "steps": PRETRAIN_STEPS,
        "model": "tiny",
        "tokenizer": {"han_run": 2},
        "data": {"kind": "documents", "row_tokens": 256},
        "batch": {"rows": 32},
        "optimizer": {"kind": "muon", "learning_rate": 0.02, "adamw_learning_rate": 3e-3},
        "schedule": {"kind": "wsd", "warmup_fraction": 0.02, "decay_fraction": 0.5},
        "validate": {"every": 100, "rows": 128},
        "sample": {"every": 100, "tokens": 80},
        "save": {"every": 100},
        "track": {"every": 10},
    }


def tiny_sft() -> Layer:
    return {
        **tiny(),
        "stage": "tiny_sft",
        "out": "runs/tiny_sft",
        "steps": SFT_STEPS,
        "data": {"kind": "chats", "row_tokens": 512},
        "batch": {"rows": 16},
        "optimizer": {"kind": "muon", "learning_rate": 0.01, "adamw_learning_rate": 1.5e-3},
        "schedule": {"kind": "wsd", "warmup_fraction": 0.02, "decay_fraction": 0.8},
        "validate": {"every": 50, "rows": 64},
        "sample": {"every": 50, "tokens": 80},
        "save": {"every": 50},
    }
