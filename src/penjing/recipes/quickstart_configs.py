"""The quickstart's two stages: a 1M-parameter model in a few minutes on two CPU cores. Run: make quickstart

Changes from pretrain and sft: the `tiny` shape; Muon; few tokens a step, as many small steps find copying from
context sooner than few large ones; a straight fall of the learning rate; short rows, as the stories are short.
"""

from __future__ import annotations

from penjing.base.config import Layer

PRETRAIN_STEPS = 1300
SFT_STEPS = 4000
DISTILL_STEPS = 1500


def tiny() -> Layer:
    return {
        "stage": "tiny",
        "out": "runs/tiny",
        "steps": PRETRAIN_STEPS,
        "model": "tiny",
        "tokenizer": {"han_run": 2},
        "data": {"kind": "documents", "row_tokens": 256},
        "batch": {"rows": 4},
        "optimizer": {"kind": "muon", "learning_rate": 0.02, "adamw_learning_rate": 0.01},
        "schedule": {"kind": "wsd", "warmup_fraction": 0.02, "decay_fraction": 0.4},
        "validate": {"every": 300, "rows": 128},
        "sample": {"every": 300, "tokens": 80},
        "save": {"every": 300},
        "track": {"every": 50},
    }


def tiny_sft() -> Layer:
    return {
        **tiny(),
        "stage": "tiny_sft",
        "out": "runs/tiny_sft",
        "steps": SFT_STEPS,
        "data": {"kind": "chats", "row_tokens": 256},
        "validate": {"every": 400, "rows": 64},
        "sample": {"every": 400, "tokens": 80},
        "save": {"every": 400},
    }


def tiny_distill() -> Layer:
    """The quickstart's SFT model as the teacher of its pretrained one:

    penjing train tiny_distill start=runs/quickstart/pretrain objective.teacher=runs/quickstart/sft
    data.train=runs/quickstart/data/sft.jsonl
    """
    return {
        **tiny_sft(),
        "stage": "tiny_distill",
        "out": "runs/tiny_distill",
        "steps": DISTILL_STEPS,
        "objective": {"kind": "distill"},
        "validate": {"every": 300, "rows": 64, "before": "yes"},
        "sample": {"every": 0},
    }
