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
    """Counts. `total` is what `model.parameters()` sums to; `matrices` are those that enter a matrix product."""

    total: int
    embedding: int
    matrices: int

    @property
    def without_embedding(self) -> int:
        return self.total - self.embedding


def parameters(config: ModelConfig) -> Parameters:
    """Exact parameter counts of a dense decoder."""
    width, layers = config.hidden_size, config.num_layers
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    per_layer = width * (2 * queries + 2 * keys) + 3 * width * config.mlp_size
    gains = 2 * width + (2 * config.head_size if config.architecture == "qwen3" else 0)
    table = config.vocabulary_size * width
    head = table if config.embeddings == "untied" else 0
    return Parameters(
        total=table + head + layers * (per_layer + gains) + width,
        embedding=table,
        matrices=layers * per_layer + table,
    )


def mean_keys(length_D: npt.NDArray[np.int64], row_tokens: int) -> float:
    """How many keys a query sees on average in packed rows: (l + 1) / 2 in a document of l tokens, cut at the row."""
    whole, rest = np.divmod(length_D, row_tokens)
    keys = whole * (row_tokens * (row_tokens + 1) / 2) + rest * (rest + 1) / 2
    total = float(length_D.sum())
    return float(keys.sum()) / total if total else (row_tokens + 1) / 2


def training_flops_per_token(config: ModelConfig, num_keys: float) -> float:
    """Model FLOPs of one token's forward and backward pass; `num_keys` as given by `mean_keys`."""
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_size * num_keys
    return 3 * (2 * parameters(config).matrices + attention)
