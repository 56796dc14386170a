"""Pretrain a language model on text. Run: penjing train pretrain model=26m data.train=FILE

On several GPUs: torchrun --nproc_per_node 8 -m penjing train pretrain model=26m data.train=FILE
"""

from penjing.base.config import Layer


def pretrain() -> Layer:
    """Pretrain a model on text, from nothing. Muon and a constant, then linearly decaying rate (WSD) reach the bits per
    byte of AdamW with cosine in half of the tokens or less, at 0.5M and 2M parameters (docs/speed.md)."""
    return {
        "stage": "pretrain",
        "out": "runs/pretrain",
        "epochs": 1,
        "model": "26m",
        "data": {"format": "documents", "seq_len": 512},
        "batch": {"size": 64, "min_steps": 100},
        "optimizer": {"name": "muon", "learning_rate": 0.02, "adamw_learning_rate": 0.003},
        "schedule": {"name": "wsd", "warmup_ratio": 0.02, "decay_ratio": 0.4},
    }
