"""Parameters and FLOPs of a model, in closed form; tests hold them against the built model.

Convention: 2 FLOPs per multiply-add; a training step is 3 forward passes (one forward, two for the gradients), less
what frozen parameters save (plan/trainable.py); the embedding look-up costs nothing, the output head is a matrix like
any other, tied or not. Attention is counted in one of two ways, which are never mixed and always named:

causal: the keys a query really looks at, (T + 1) / 2 on average for a full row of T, less where documents are short or
a window hides some. What a fused kernel does, and what our MFU is of.
full square: T keys for every query, 12 L H K T a token (arXiv:2204.02311, appendix B). What PaLM, nanoGPT, llm.c and
llm-foundry report; higher by the half that a causal mask throws away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from penjing.model.config import ModelConfig

if TYPE_CHECKING:  # needs torch
    from penjing.plan.trainable import Trainable


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts. `total` is what `model.parameters()` sums to; `active` are those one token goes through, `matrices` those
    of them that enter a matmul."""

    total: int
    active: int
    embedding: int
    matrices: int

    @property
    def without_embedding(self) -> int:
        return self.total - self.embedding


def parameters(config: ModelConfig) -> Parameters:
    """Exact parameter counts. Of a mixture, a token goes through its k routed experts and the shared ones."""
    parts, layers = components(config), config.num_hidden_layers
    dense = sum(config.is_dense_layer(layer) for layer in range(layers))
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = (layers - dense) * (config.num_experts - config.num_experts_per_tok) * expert
    total, table = sum(parts.values()), parts["embedding"]
    biases = layers * config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
    vectors = parts["norms"] + (biases if config.has_qkv_bias else 0)
    matrices = total - idle - vectors - (0 if config.tie_word_embeddings else table)
    return Parameters(total=total, active=total - idle, embedding=table, matrices=matrices)


def components(config: ModelConfig) -> dict[str, int]:
    """Where the parameters are; the values add up to the total. A tied head is the embedding and counts nothing."""
    width, layers = config.hidden_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    dense = sum(config.is_dense_layer(layer) for layer in range(layers))
    sparse = layers - dense
    heads = layers * 2 * config.head_dim if config.normalises_heads else 0
    gate = width if config.architecture == "qwen2_moe" else 0
    parts = {
        "embedding": config.vocab_size * width,
        "head": config.vocab_size * width if not config.tie_word_embeddings else 0,
        "attention": layers * (2 * width * (queries + keys) + (queries + 2 * keys if config.has_qkv_bias else 0)),
        "mlp": dense * 3 * width * config.intermediate_size,
        "experts": sparse * 3 * width * config.moe_intermediate_size * config.num_experts,
        "shared experts": sparse * (3 * width * config.shared_expert_intermediate_size + gate),
        "router": sparse * width * config.num_experts,
        "norms": layers * 2 * width + width + heads,
    }
    return {name: count for name, count in parts.items() if count}


def mean_keys(length_D: npt.NDArray[np.int64], seq_len: int) -> float:
    """How many keys a query sees on average in packed rows: (l + 1) / 2 in a document of l tokens, cut at the row."""
    whole, rest = np.divmod(length_D, seq_len)
    pairs = whole * (seq_len * (seq_len + 1) / 2) + rest * (rest + 1) / 2  # of a query and a key
    total = float(length_D.sum())
    return float(pairs.sum()) / total if total else (seq_len + 1) / 2


def windowed_keys(num_keys: float, window: int) -> float:
    """Keys a query sees on average in a layer with this window (0: none), where without one it sees `num_keys`.

    Exact for documents that are all of one length, which is then 2 num_keys - 1, as of rows that are one document each.
    Of others it is the most there can be: the mean rises ever more slowly with the length.
    """
    length = 2 * num_keys - 1
    return num_keys if not window or length <= window else window - window * (window - 1) / (2 * length)


def training_flops_per_token(
    config: ModelConfig,
    num_keys: float,
    *,
    window_keys: float | None = None,
    trainable: Trainable | None = None,
    extra_forwards: float = 0.0,
) -> float:
    """Model FLOPs of one token's forward and backward pass; `num_keys` as given by `mean_keys`.

    num_keys = T gives the full-square convention. window_keys: the mean in windowed layers, where it is known; else as
    `windowed_keys` says.

    trainable: what learns, where that is not everything (frozen parameters, adapters): the rest gets no gradient of its
    own, and below the lowest that learns there is no backward pass. extra_forwards: forward passes of other models of
    this shape (a reference). What activation checkpointing does twice is work of the device, not of the model.
    """
    attention, again = 0.0, 0.0
    for layer in range(config.num_hidden_layers):
        window = config.window(layer)
        keys = window_keys if window and window_keys is not None else windowed_keys(num_keys, window)
        one = 2 * 2 * config.num_attention_heads * config.head_dim * keys
        attention += one
        again += 2 * one if trainable is None or layer >= trainable.attention_from else 0.0
    matmuls = 2 * parameters(config).matrices
    backward = 2 * matmuls
    adapters = 0
    if trainable is not None:
        backward = 2 * (trainable.weights + trainable.inputs)
        adapters = 2 * (2 * trainable.adapters + trainable.adapter_inputs)
    own = matmuls + attention + backward + again + adapters
    return own + extra_forwards * (matmuls + attention)
