"""Parameters and FLOPs of a model, in closed form; tests compare them with the built model.

Convention: 2 FLOPs per multiply-add. A training step is 3 forward passes (one forward, two for the gradients), less
what frozen parameters save (plan/trainable.py). The embedding look-up costs nothing; the output head counts as a
matrix, tied or not. Attention is counted in one of two ways, always named and never mixed:

causal: the keys a query attends to, (T + 1) / 2 on average for a full row of T, fewer with short documents or a
window. This is what a fused kernel computes; our MFU uses it.
full square: T keys for every query, 12 L H K T a token (arXiv:2204.02311, appendix B). PaLM, nanoGPT, llm.c and
llm-foundry report it; it includes the half that a causal mask discards.
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
    """Counts. `total`: the sum over `model.parameters()`; `active`: used by one token; `matrices`: those of the active
    ones that enter a matmul."""

    total: int
    active: int
    embedding: int
    matrices: int

    @property
    def without_embedding(self) -> int:
        return self.total - self.embedding


def parameters(config: ModelConfig) -> Parameters:
    """Exact parameter counts. In a MoE model a token uses its k routed experts and the shared ones."""
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
    """Parameters by component; the values add up to the total. A tied head is the embedding and counts 0."""
    width, layers = config.hidden_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    dense = sum(config.is_dense_layer(layer) for layer in range(layers))
    sparse = layers - dense
    heads = layers * 2 * config.head_dim if config.normalises_heads else 0
    gate = width if config.architecture == "qwen2_moe" else 0
    counts = {
        "embedding": config.vocab_size * width,
        "head": config.vocab_size * width if not config.tie_word_embeddings else 0,
        "attention": layers * (2 * width * (queries + keys) + (queries + 2 * keys if config.has_qkv_bias else 0)),
        "mlp": dense * 3 * width * config.intermediate_size,
        "experts": sparse * 3 * width * config.moe_intermediate_size * config.num_experts,
        "shared experts": sparse * (3 * width * config.shared_expert_intermediate_size + gate),
        "router": sparse * width * config.num_experts,
        "norms": layers * 2 * width + width + heads,
    }
    return {name: count for name, count in counts.items() if count}


def mean_keys(length_D: npt.NDArray[np.int64], seq_len: int) -> float:
    """Mean keys per query in packed rows: (l + 1) / 2 in a document of l tokens; documents are cut at row ends."""
    full_rows, remainder = np.divmod(length_D, seq_len)
    pairs = full_rows * (seq_len * (seq_len + 1) / 2) + remainder * (remainder + 1) / 2  # of a query and a key
    total = float(length_D.sum())
    return float(pairs.sum()) / total if total else (seq_len + 1) / 2


def windowed_keys(num_keys: float, window: int) -> float:
    """Mean keys per query in a layer with this window (0: none), given the mean `num_keys` without one.

    Exact if all documents have one length, which is then 2 num_keys - 1 (as with one document per row). Otherwise it
    is an upper bound: the mean is a concave function of the length.
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

    num_keys = T gives the full-square convention. window_keys: the mean in windowed layers, if known; default:
    `windowed_keys`.

    trainable: the trainable part, if not everything (frozen parameters, adapters). Frozen parameters get no gradient,
    and below the lowest trainable one there is no backward pass. extra_forwards: forward passes of other models of
    this shape (a reference model). Recomputation by activation checkpointing does not count as model FLOPs.
    """
    attention, attention_backward = 0.0, 0.0
    for layer in range(config.num_hidden_layers):
        window = config.window(layer)
        keys = window_keys if window and window_keys is not None else windowed_keys(num_keys, window)
        layer_attention = 2 * 2 * config.num_attention_heads * config.head_dim * keys
        attention += layer_attention
        attention_backward += 2 * layer_attention if trainable is None or layer >= trainable.attention_from else 0.0
    matmuls = 2 * parameters(config).matrices
    backward = 2 * matmuls
    adapters = 0
    if trainable is not None:
        backward = 2 * (trainable.weights + trainable.inputs)
        adapters = 2 * (2 * trainable.adapters + trainable.adapter_inputs)
    model_flops = matmuls + attention + backward + attention_backward + adapters
    return model_flops + extra_forwards * (matmuls + attention)
