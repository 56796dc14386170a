"""Learn a language from text. Run: penjing train pretrain model=26m data.train=FILE

On several GPUs: torchrun --nproc_per_node 8 -m penjing train pretrain model=26m data.train=FILE
"""

from __future__ import annotations

from penjing.base.config import Layer


def pretrain() -> Layer:
    """AdamW at the nearest peer's rate, with the warm-up and the decay of matrices only that it lacks."""
    return {
        "stage": "pretrain",
        "out": "runs/pretrain",
        "epochs": 1,
        "model": "26m",
        "data": {"kind": "documents", "row_tokens": 512},
        "batch": {"rows": 64},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_fraction": 0.02, "floor_fraction": 0.1},
    }
