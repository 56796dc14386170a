"""Supervised fine-tuning on conversations. Run: penjing train sft init_from=runs/pretrain data.train=CHATS.jsonl

Changes from pretrain: starts from a run; the data are conversations, with loss on the assistant's tokens only; AdamW at
a low learning rate; two epochs.
"""

from penjing.base.config import Layer
from penjing.recipes.pretrain import pretrain


def sft() -> Layer:
    return {
        **pretrain(),
        "stage": "sft",
        "out": "runs/sft",
        "epochs": 2,
        "data": {"format": "chats", "seq_len": 1024, "min_seq_len": 64},
        "batch": {"size": 32, "min_steps": 100},
        "optimizer": {"name": "adamw", "learning_rate": 2e-4, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_ratio": 0.02, "min_lr_ratio": 0.1},
    }


def lora() -> Layer:
    """SFT with LoRA adapters. Run: penjing train lora init_from=runs/pretrain data.train=CHATS.jsonl

    Changes from sft: the weights of `init_from` are frozen, and adapters on its linear layers are trained. The learning
    rate is five times that of full fine-tuning (2e-4), as adapters need. No weight decay, which would pull towards the
    base model instead of small weights. Writes RUN/adapter in the format of `peft`.
    """
    return {
        **sft(),
        "stage": "lora",
        "out": "runs/lora",
        "lora": {"rank": 16, "alpha": 32},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "weight_decay": 0.0},
    }
