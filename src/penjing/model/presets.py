"""Shapes people know, by name. `penjing show models` prints them with their exact parameter counts."""

from __future__ import annotations

# Each entry lists what differs from ModelConfig's defaults.
PRESETS: dict[str, dict[str, object]] = {
    # The quickstart's, for two CPU cores. One wide head a layer instead of four narrow ones: as wide as the model, it
    # can match any token with itself, and copying from context forms far sooner (docs/log.md).
    "tiny": {
        "vocabulary_size": 2048,
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_size": 128,
        "mlp_size": 352,
        "max_tokens": 1024,
        "rope_theta": 1e4,
        "norm_epsilon": 1e-6,
    },
    # MiniMind 2 small: 25.83 M, Llama layout.
    "26m": {"architecture": "llama"},
    # MiniMind 3: 63.91 M, Qwen3 layout.
    "64m": {
        "hidden_size": 768,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_size": 96,
        "mlp_size": 2432,
        "norm_epsilon": 1e-6,
    },
    # MiniMind 2: 104.03 M, Llama layout.
    "104m": {
        "architecture": "llama",
        "hidden_size": 768,
        "num_layers": 16,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 96,
        "mlp_size": 2048,
    },
}
