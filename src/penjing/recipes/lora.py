"""Teach a trained model with small adapters. Run: penjing train lora start=runs/pretrain data.train=CHATS.jsonl

Changes from sft: the weights of `start` stay as they are and adapters beside its linear layers learn; five times the
learning rate, as adapters bear and want more than whole weights (2e-4 there); no weight decay, which would pull towards
the base and not towards small weights. Ends with RUN/adapter in the format of `peft`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penjing.base.config import Layer
from penjing.recipes.sft import sft

# Of a whole model's rate. What adapters add begins at zero and is a product of two small matrices, so that the same
# rate moves the model less: at a whole model's rate DPO with adapters learned next to nothing (docs/log.md).
ADAPTERS_LEARN_FASTER = 10
# The same of preferences: at 1e-4 the quickstart's model kept its 40 tool calls, of which the pairs have none; at 3e-4
# it lost 13, at 1e-3 all (docs/methods/dpo.md).
WITH_PREFERENCES = 2
# A reward model with adapters learned at 0.01 and fell apart at 0.03.
LARGEST_RATE = 0.01


def lora() -> Layer:
    return {
        **sft(),
        "stage": "lora",
        "out": "runs/lora",
        "lora": {"rank": 16, "alpha": 32},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.0},
    }


def adapter_rate(base: Layer, layers: Sequence[Layer]) -> Layer:
    """The recipe `base` with a rate for adapters, where the layers ask for them and name no optimizer or rate.

    A recipe that has adapters of its own knows its rate, and Muon's steps have one size whatever the gradient's.
    """
    ranks = [_table(layer, "lora").get("rank") for layer in layers]
    rank = next((rank for rank in reversed(ranks) if rank is not None), 0)
    named = any({"kind", "learning_rate", ""} & _table(layer, "optimizer").keys() for layer in layers)
    optimizer = dict(base["optimizer"])
    if str(rank) == "0" or named or "lora" in base or optimizer["kind"] != "adamw":
        return base
    whole = float(optimizer["learning_rate"])
    faster = WITH_PREFERENCES if base.get("objective", {}).get("kind") == "preference" else ADAPTERS_LEARN_FASTER
    rate = max(whole, min(faster * whole, LARGEST_RATE))
    return {**base, "optimizer": {**optimizer, "learning_rate": float(f"{rate:.3g}")}}


def _table(layer: Layer, name: str) -> Mapping[str, Any]:
    table = layer.get(name, {})
    return table if isinstance(table, Mapping) else {"": table}
