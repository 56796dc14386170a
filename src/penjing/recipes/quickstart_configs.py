"""The quickstart's two stages, and distillation at their size.

Changes from pretrain and sft: the `tiny` shape; Muon; few tokens per step, as many small steps learn copying from
context sooner than few large ones; linear decay of the learning rate; short rows, as the stories are short.
"""

from penjing.base.config import Layer

PRETRAIN_STEPS = 1300
SFT_STEPS = 4000
DISTILL_STEPS = 1500


def tiny() -> Layer:
    """The quickstart's pretraining: a 1M-parameter model in a few minutes on two CPU cores. Run: penjing quickstart"""
    return {
        "stage": "tiny",
        "out": "runs/tiny",
        "max_steps": PRETRAIN_STEPS,
        "model": "tiny",
        "tokenizer": {"max_han_per_token": 2},
        "data": {"format": "documents", "seq_len": 256},
        "batch": {"size": 4},
        "optimizer": {"name": "muon", "learning_rate": 0.02, "adamw_learning_rate": 0.01},
        "schedule": {"name": "wsd", "warmup_ratio": 0.02, "decay_ratio": 0.4},
        "eval": {"every": 300, "sequences": 128},
        "sample": {"every": 300, "max_new_tokens": 80},
        "checkpoint": {"every": 300},
        "log": {"every": 50},
    }


def tiny_sft() -> Layer:
    """The quickstart's SFT."""
    return {
        **tiny(),
        "stage": "tiny_sft",
        "out": "runs/tiny_sft",
        "max_steps": SFT_STEPS,
        "data": {"format": "chats", "seq_len": 256},
        "eval": {"every": 400, "sequences": 64},
        "sample": {"every": 400, "max_new_tokens": 80},
        "checkpoint": {"every": 400},
    }


def tiny_distill() -> Layer:
    """Distil the quickstart's SFT model into its pretrained one.

    penjing train tiny_distill init_from=runs/quickstart/pretrain objective.teacher=runs/quickstart/sft
    data.train=runs/quickstart/data/sft.jsonl
    """
    return {
        **tiny_sft(),
        "stage": "tiny_distill",
        "out": "runs/tiny_distill",
        "max_steps": DISTILL_STEPS,
        "objective": {"name": "distill"},
        "eval": {"every": 300, "sequences": 64, "at_start": True},
        "sample": {"every": 0},
    }
