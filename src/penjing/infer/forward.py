"""One forward pass over tokens of many sequences, with a KV cache in slots."""

from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing import devices
from penjing.base.errors import UserError
from penjing.loader.batch import to_device
from penjing.model.config import ModelConfig
from penjing.model.lora import adapted
from penjing.model.transformer import Transformer

Ints = NDArray[np.int64]
Weights = Literal["auto", "int8"]
DEFAULT_MAX_TOKENS = 4096  # positions of a slot by default
UNKNOWN_MEMORY_BYTES = 8e9  # assumed where the device does not say
CACHE_MEMORY_FRACTION = 0.25  # largest share of the device's memory for the default KV cache


class Forward(Protocol):
    """A model over rows. A row is one token of one sequence: decoding has one row per sequence, prefill has many. The
    KV cache has `num_slots` slots of `max_tokens` positions each, allocated once."""

    num_slots: int
    max_tokens: int
    vocab_size: int
    device: torch.device
    batch_invariant: bool  # a row's results do not depend on the other rows of its pass, bit for bit
    adapters: tuple[str, ...]  # names, in the model's order
    active_adapter: int  # index of the one set by `lora.set_adapter`; -1 = base model
    bytes_per_slot: int  # keys and values

    def __call__(
        self, slot_N: Ints, position_N: Ints, id_N: Ints, logits_index_R: Ints, adapter_N: Ints | None = None
    ) -> Tensor:
        """logits_RV in float32 of the rows `logits_index_R`, on the device; valid until the next call.

        A row's token is cached at its position of its slot and attends to the positions before it. Rows of one slot
        are contiguous; their positions ascend from the first one that is not cached yet. adapter_N: index in
        `adapters`, -1 = base model; None: `active_adapter` for all.
        """

    def copy_prefix(self, source: int, target: int, tokens: int) -> None:
        """Copy the KV cache of the first `tokens` positions to another slot."""

    def clear(self, slot: int) -> None:
        """Remove NaN and Inf from the KV cache of this slot, if they could reach its next sequence."""

    def close(self) -> None:
        """Free the memory and restore the model."""


def active_adapter(model: Transformer, names: tuple[str, ...]) -> int:
    """The index of the adapter that all rows use now, or -1."""
    active = {layer.active for layer in adapted(model).values()} - {None}
    if len(active) > 1:
        raise UserError("several adapters are active at once", got=", ".join(sorted(map(str, active))))
    return names.index(str(active.pop())) if active else -1


def bytes_per_slot(config: ModelConfig, max_tokens: int, dtype: torch.dtype) -> int:
    """KV cache of one sequence: 2 x layers x key heads x K x tokens x bytes."""
    numel = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * max_tokens
    return numel * dtype.itemsize


def default_slots(model: Transformer, max_tokens: int = 0) -> int:
    """Number of slots on the model's device: 64 on a CPU, else 256; fewer if their KV cache would take more than a
    quarter of its memory."""
    device = model.embed.weight.device
    kind = devices.of(device)
    slot_bytes = bytes_per_slot(model.config, max_tokens or default_tokens(model), model.compute_dtype or torch.float32)
    cache_bytes = CACHE_MEMORY_FRACTION * (kind.memory_bytes(device) or UNKNOWN_MEMORY_BYTES)
    return max(1, min(kind.decode_slots, int(cache_bytes / slot_bytes)))


def default_tokens(model: Transformer) -> int:
    """Positions of a slot: the model's longest sequence, up to 4,096."""
    return min(model.config.max_position_embeddings, DEFAULT_MAX_TOKENS)


def ints(values: Any) -> Ints:
    return np.asarray(values, dtype=np.int64)


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. The host does not wait until a GPU has done its earlier work."""
    tensor: Tensor = to_device(torch.from_numpy(values), device)
    return tensor
