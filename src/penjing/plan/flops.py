"""Parameters and FLOPs of a model, in closed form; tests hold them against the built model.

Convention: 2 FLOPs per multiply-add; a training step is 3 forward passes (one forward, two for the gradients); the
embedding look-up costs nothing, the output head is a matrix like any other, tied or not. Attention counts the keys a
query really looks at: T / 2 on average for a full causal row of T, less where documents are short. The PaLM and nanoGPT
convention counts T and is that much higher.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penjing.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts. `total` is what `model.parameters()` sums to; `active` are those one token goes through, `matrices` those
    of them that enter a matrix product."""

    total: int
    active: int
    embedding: int
    matrices: int

    @property
    def without_embedding(self) -> int:
        return self.total - self.embedding


def parameters(config: ModelConfig) -> Parameters:
    """Exact parameter counts. Of a mixture, a token goes through its k routed experts and the shared ones."""
    width, layers = config.hidden_size, config.num_layers
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention = width * (2 * queries + 2 * keys)
    vectors = 2 * width + (2 * config.head_size if config.normalises_heads else 0)
    vectors += queries + 2 * keys if config.has_qkv_bias else 0
    dense = sum(config.is_dense_layer(layer) for layer in range(layers))
    expert = 3 * width * config.expert_size
    shared = 3 * width * config.shared_expert_size + (width if config.architecture == "qwen2_moe" else 0)
    always = layers * attention + dense * 3 * width * config.mlp_size
    always += (layers - dense) * (width * config.experts + shared)
    idle = (layers - dense) * (config.experts - config.experts_per_token) * expert
    matrices = always + (layers - dense) * config.experts_per_token * expert
    table = config.vocabulary_size * width
    head = table if config.embeddings == "untied" else 0
    active = table + head + matrices + layers * vectors + width
    return Parameters(total=active + idle, active=active, embedding=table, matrices=matrices + table)


def mean_keys(length_D: npt.NDArray[np.int64], row_tokens: int) -> float:
    """How many keys a query sees on average in packed rows: (l + 1) / 2 in a document of l tokens, cut at the row."""
    whole, rest = np.divmod(length_D, row_tokens)
    keys = whole * (row_tokens * (row_tokens + 1) / 2) + rest * (rest + 1) / 2
    total = float(length_D.sum())
    return float(keys.sum()) / total if total else (row_tokens + 1) / 2


def training_flops_per_token(
    config: ModelConfig, num_keys: float, *, adapters: int = 0, extra_forwards: float = 0.0, frozen: bool = False
) -> float:
    """Model FLOPs of one token's forward and backward pass; `num_keys` as given by `mean_keys`.

    frozen: the base of adapters, `adapters` parameters in all, whose matrices get no gradient: two passes' worth of
    work instead of three. extra_forwards: forward passes of other models of this shape (a reference).
    """
    # A window can only take keys away. How many of the mean lie within it depends on the documents; all are counted
    # up to its size, which is too many where documents are about as long as the window.
    keys = sum(min(num_keys, config.window(layer) or num_keys) for layer in range(config.num_layers))
    attention = 2 * 2 * config.num_heads * config.head_size * keys
    products = 2 * parameters(config).matrices
    own = 2 * products + 3 * attention + 3 * 2 * adapters if frozen else 3 * (products + attention)
    return own + extra_forwards * (products + attention)
