"""Pretrain on ten million words, as in BabyLM's strict-small track. Run: penjing train babylm data.train=FOLDER

The track allows ten passes over the text, so the recipe has noise, weight decay and a mean of the weights, and keeps
the checkpoint with the lowest held-out loss.
"""

from penjing.base.config import Layer
from penjing.recipes.pretrain import pretrain


def babylm() -> Layer:
    """Pretrain on ten million words, English or Chinese. The settings are those that won after 12 epochs of 2.5 MB in
    both languages (docs/log.md); on ten million words they are an estimate."""
    return {
        **pretrain(),
        "stage": "babylm",
        "out": "runs/babylm",
        "epochs": 10,
        "ema_decay": 0.99,
        "optimizer": {**pretrain()["optimizer"], "weight_decay": 0.4},
        "regularization": {"dropout": 0.1},
    }
