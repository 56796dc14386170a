"""The shape of a model, as numbers. Two architectures, each equal to a stock `transformers` class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penjing.base.errors import UserError, suggest

_COUNTS = (
    "vocabulary_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "mlp_size",
    "max_tokens",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a dense decoder (pre-norm RMSNorm, grouped-query attention, SwiGLU, rotary positions, no biases)."""

    preset: str = "26m"  # named shape this one started from; see penjing/model/presets.py
    architecture: Literal["qwen3", "llama"] = "qwen3"  # qwen3 normalises each query and key head, llama does not
    vocabulary_size: int = 6400  # V, token ids; at least as many as the tokenizer has
    hidden_size: int = 512  # D, width of the residual stream
    num_layers: int = 8  # decoder blocks
    num_heads: int = 8  # H, query heads
    num_kv_heads: int = 2  # G, key/value heads; H / G query heads share one
    head_size: int = 64  # K, width of one head
    mlp_size: int = 1408  # F, SwiGLU's inner width
    max_tokens: int = 32768  # longest sequence the model is meant for
    rope_theta: float = 1e6  # base of the rotary frequencies (arXiv:2104.09864)
    norm_epsilon: float = 1e-5  # added to the mean square in RMSNorm
    embeddings: Literal["tied", "untied"] = "tied"  # whether the output head is the embedding table
    experts: int = 0  # mixture of experts; 0 = dense, the only kind of this version

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UserError("too small", where=f"model.{name}", got=getattr(self, name), wanted="at least 1")
        for name in ("rope_theta", "norm_epsilon"):
            if not getattr(self, name) > 0:
                raise UserError("too small", where=f"model.{name}", got=getattr(self, name), wanted="more than 0")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                "query heads must be a whole multiple of key/value heads",
                where="model.num_heads",
                got=f"{self.num_heads} over {self.num_kv_heads}",
            )
        if self.head_size % 2:
            raise UserError("rotary positions need an even width", where="model.head_size", got=self.head_size)
        if self.experts:
            raise UserError(
                "mixture of experts is not in this version",
                where="model.experts",
                got=self.experts,
                wanted=0,
                next_step="Leave model.experts out to train a dense model.",
            )

    @classmethod
    def named(cls, name: str) -> dict[str, object]:
        """The settings of a preset, by name. Raises UserError if there is none of that name."""
        from penjing.model.presets import PRESETS

        if name not in PRESETS:
            raise UserError(
                f"no model preset is called {name!r}", where="model.preset", next_step=suggest(name, PRESETS)
            )
        return {"preset": name, **PRESETS[name]}
