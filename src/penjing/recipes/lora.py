"""SFT with LoRA adapters. Run: penjing train lora init_from=runs/pretrain data.train=CHATS.jsonl

Changes from sft: the weights of `init_from` are frozen, and adapters on its linear layers are trained. The learning
rate is five times that of full fine-tuning (2e-4), as adapters need. No weight decay, which would pull towards the base
model instead of small weights. Writes RUN/adapter in the format of `peft`.
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
