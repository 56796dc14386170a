"""Teach a trained model with small adapters. Run: penjing train lora init_from=runs/pretrain data.train=CHATS.jsonl

Changes from sft: the weights of `init_from` stay as they are and adapters beside its linear layers learn; five times
the learning rate, as adapters bear and want more than whole weights (2e-4 there); no weight decay, which would pull
towards the base and not towards small weights. Ends with RUN/adapter in the format of `peft`.
"""

from __future__ import annotations

from penjing.base.config import Layer
from penjing.recipes.sft import sft


def lora() -> Layer:
    return {
        **sft(),
        "stage": "lora",
        "out": "runs/lora",
        "lora": {"rank": 16, "alpha": 32},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.0},
    }
