"""Pretrain a model of a given size; all other settings follow. Run: penjing train ladder:30m data.train=FILE

Changes from pretrain: the shape is one of the ladder (penjing/model/presets.py), any size from 500k to 3b; 20 tokens
per parameter (arXiv:2203.15556; train longer for heavy use); learning rate and batch size by the Step Law
(arXiv:2503.04715), N without the embedding: rate = 1.79 N^-0.713 D^0.307, batch = 0.58 D^0.571 tokens.
"""

import math

from penjing.base import config
from penjing.base.config import Layer
from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters
from penjing.recipes.pretrain import pretrain

TOKENS_PER_PARAMETER = 20
ROW_TOKENS = 512


def ladder(size: str = "30m") -> Layer:
    """Pretraining of a model of any size with 20 tokens a parameter; batch and rate follow from the size.

    size: approximate number of parameters, such as 30m. Raises UserError if it is out of range.
    """
    preset = f"ladder-{size}"
    count = parameters(config.resolve(ModelConfig, {"preset": preset}))
    tokens = TOKENS_PER_PARAMETER * count.total
    rate = 1.79 * count.without_embedding**-0.713 * tokens**0.307
    batch_size = _smooth(max(8.0, 0.58 * tokens**0.571 / ROW_TOKENS))
    return {
        **pretrain(),
        "stage": "ladder",
        "out": f"runs/ladder-{size}",
        "max_steps": math.ceil(tokens / (batch_size * ROW_TOKENS)),
        "model": preset,
        "data": {"format": "documents", "seq_len": ROW_TOKENS},
        "batch": {"size": batch_size},
        "optimizer": {"name": "adamw", "learning_rate": float(f"{rate:.2g}"), "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_ratio": 0.02, "min_lr_ratio": 0.1},
    }


def _smooth(rows: float) -> int:
    """The nearest number 4 to 7 times a power of two: it divides among devices and into micro-batches of many sizes."""
    power = 1 << (math.floor(math.log2(rows)) - 2)
    return round(rows / power) * power
