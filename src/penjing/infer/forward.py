"""One pass of a model over tokens of many sequences, with their keys and values in slots."""

from __future__ import annotations

import os
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer

Ints = NDArray[np.int64]
Weights = Literal["auto", "int8"]
LONGEST = 4096  # positions of a slot, where nobody asked for more or fewer
SLOTS = {"cpu": 64}  # small passes stay in a CPU's cache
SLOTS_ELSEWHERE = 256
CACHE_SHARE = 0.25  # of the device's memory, that keys and values take by default


class Forward(Protocol):
    """A model that reads rows. A row is one token of one sequence: decoding gives one row a sequence, prefill many.

    Keys and values live in `num_slots` slots of `max_tokens` positions each, allocated once.
    """

    num_slots: int
    max_tokens: int
    vocab_size: int
    device: torch.device
    exact: bool  # a row's values do not depend on the other rows of its pass, to the last bit
    adapters: tuple[str, ...]  # the model's, in order
    active: int  # which of them `lora.set_adapter` had set; -1 = the base alone
    bytes_per_slot: int  # keys and values

    def __call__(
        self, slot_N: Ints, position_N: Ints, id_N: Ints, logits_at_R: Ints, adapter_N: Ints | None = None
    ) -> Tensor:
        """logits_RV in float32 of the rows `logits_at_R`, on the device.

        A row's token is written at its position of its slot and sees the positions before it. Rows of one slot stand
        side by side, positions ascending from the first that is not yet written. adapter_N: index in `adapters`, -1 =
        the base alone; None: `active` for all.
        """

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy keys and values of a slot's first `tokens` positions to another slot."""

    def close(self) -> None:
        """Give the memory back, and the model as it was."""


def make_forward(model: Transformer, *, num_slots: int, max_tokens: int, weights: Weights = "auto") -> Forward:
    """The fastest way to run this model on its device."""
    from penjing.infer import cpu_forward
    from penjing.infer.torch_forward import TorchForward

    why = cpu_forward.supports(model)
    if not why:
        return cpu_forward.CpuForward(model, num_slots=num_slots, max_tokens=max_tokens, weights=weights)
    if weights != "auto":
        raise UserError(f"only the C kernels for CPUs have them: {why}", where="weights", got=weights)
    return TorchForward(model, num_slots=num_slots, max_tokens=max_tokens)


def bytes_per_slot(config: ModelConfig, max_tokens: int, dtype: torch.dtype) -> int:
    """Memory of one sequence's keys and values: 2 x layers x key heads x K x tokens x bytes."""
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * max_tokens
    return values * dtype.itemsize


def default_slots(model: Transformer, max_tokens: int = 0) -> int:
    """Sequences written at once on the model's device: 64 on a CPU, else 256; fewer where their keys and values would
    take more than a quarter of its memory."""
    device = model.embed.weight.device
    most = SLOTS.get(device.type, SLOTS_ELSEWHERE)
    each = bytes_per_slot(model.config, max_tokens or default_tokens(model), model.compute_dtype or torch.float32)
    return max(1, min(most, int(CACHE_SHARE * _memory(device) / each)))


def default_tokens(model: Transformer) -> int:
    """Positions of a slot: the model's longest sequence, up to 4,096."""
    return min(model.config.max_position_embeddings, LONGEST)


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):  # no such question on this system
        return 8e9


def ints(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)
