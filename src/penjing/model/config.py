"""The shape of a model, as numbers. Every architecture equals a stock `transformers` class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from penjing.base.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from penjing.base.errors import UserError, suggest

DENSE = ("qwen3", "qwen2", "llama")
MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """Shape of a decoder: pre-norm RMSNorm, grouped-query attention, SwiGLU or a mixture of them, rotary positions."""

    section: ClassVar = "model"

    preset: str = "26m"  # named shape this one started from; see penjing/model/presets.py
    # What sets them apart: qwen3 and glm4_moe normalise each query and key head, llama and mixtral do not, qwen2 has
    # biases there instead. Mixtures: glm4_moe has shared experts, a sigmoid router and balances it by bias; qwen3_moe
    # and mixtral have a softmax router and no shared expert; qwen2_moe has one behind a gate.
    architecture: Literal["qwen3", "qwen2", "llama", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"] = "qwen3"
    vocab_size: PositiveInt = 6400  # V, token ids; at least as many as the tokenizer has
    hidden_size: PositiveInt = 512  # D, width of the residual stream
    num_hidden_layers: PositiveInt = 8  # decoder blocks
    num_attention_heads: PositiveInt = 8  # H, query heads
    num_key_value_heads: PositiveInt = 2  # G, key/value heads; H / G query heads share one
    head_dim: PositiveInt = 64  # K, width of one head
    intermediate_size: PositiveInt = 1408  # F, SwiGLU's inner width in dense layers
    max_position_embeddings: PositiveInt = 32768  # longest sequence the model is meant for
    rms_norm_eps: PositiveFloat = 1e-5  # added to the mean square in RMSNorm
    tie_word_embeddings: bool = True  # whether the output head is the embedding table
    qk_norm: Literal["auto", "head", "none"] = "auto"  # RMSNorm of each query and key head; auto: as the class
    attention_bias: Literal["auto", "qkv", "none"] = "auto"  # added to queries, keys, values; auto: as the class

    rope_theta: PositiveFloat = 1e6  # base of the rotary frequencies (arXiv:2104.09864)
    partial_rotary_factor: float = 1.0  # share of each head that is turned; the rest carries no position
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"  # how positions beyond the original reach fit in
    rope_factor: PositiveFloat = 1.0  # longer by how much
    rope_original_max_position_embeddings: NonNegativeInt = 0  # longest sequence before scaling (yarn, llama3)
    rope_beta_fast: PositiveFloat = 32.0  # yarn: frequencies that turn more often than this in the original length stay
    rope_beta_slow: PositiveFloat = 1.0  # yarn: those that turn less often than this are divided by the factor
    rope_low_freq_factor: PositiveFloat = 1.0  # llama3: the same two borders, under its names
    rope_high_freq_factor: PositiveFloat = 4.0
    rope_attention_factor: NonNegativeFloat = 0.0  # yarn: scale of queries and keys; 0 = 0.1 ln(factor) + 1

    sliding_window: NonNegativeInt = 0  # keys that a query of a windowed layer sees, its own included; 0 = all
    sliding_window_layers: tuple[int, ...] = ()  # which layers those are, from 0; empty with a window: every layer

    num_experts: int = 0  # E, routed experts of a layer; 0 = dense
    num_experts_per_tok: int = 0  # k, routed experts that each token goes through
    moe_intermediate_size: int = 0  # inner width of one routed expert
    # inner width of the shared experts together, which every token goes through; 0 = none
    shared_expert_intermediate_size: NonNegativeInt = 0
    mlp_only_layers: tuple[int, ...] = ()  # layers, from 0, with an MLP of intermediate_size instead of experts
    norm_topk_prob: bool = True  # whether the k experts' weights are divided by their sum
    routed_scaling_factor: PositiveFloat = 1.0  # glm4_moe: the routed experts' sum is multiplied by this

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                "query heads must be a whole multiple of key/value heads",
                where="model.num_attention_heads",
                got=f"{self.num_attention_heads} over {self.num_key_value_heads}",
            )
        if self.architecture == "llama" and self.hidden_size % self.num_attention_heads:
            raise UserError(
                "the stock llama class wants a width that its heads divide",
                where="model.hidden_size",
                got=self.hidden_size,
                wanted=f"a multiple of model.num_attention_heads = {self.num_attention_heads}",
            )
        if self.head_dim % 2:
            raise UserError("rotary positions need an even width", where="model.head_dim", got=self.head_dim)
        self._check_positions()
        self._check_mixture()

    def _check_positions(self) -> None:
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_size % 2:
            raise UserError(
                "must leave an even number of turned dimensions",
                where="model.partial_rotary_factor",
                got=f"{self.partial_rotary_factor} of {self.head_dim}",
            )
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise UserError(
                "has no effect without a way of scaling",
                where="model.rope_factor",
                got=self.rope_factor,
                next_step="Set model.rope_scaling=yarn (or linear, llama3).",
            )
        if self.rope_scaling in ("yarn", "llama3") and self.rope_original_max_position_embeddings < 1:
            raise UserError(
                "the length before scaling is needed",
                where="model.rope_original_max_position_embeddings",
                got=self.rope_original_max_position_embeddings,
                wanted="the max_position_embeddings of the model before scaling",
            )
        if self.sliding_window_layers and not self.sliding_window:
            raise UserError("has no effect without model.sliding_window", where="model.sliding_window_layers")
        if self.rope_scaling == "llama3" and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise UserError(
                "leaves nothing between the borders",
                where="model.rope_high_freq_factor",
                got=self.rope_high_freq_factor,
                wanted=f"more than model.rope_low_freq_factor = {self.rope_low_freq_factor}",
            )
        if self.sliding_window and self.architecture in ("llama", "glm4_moe"):
            raise UserError(
                f"the stock {self.architecture} class has no sliding window",
                where="model.sliding_window",
                got=self.sliding_window,
                next_step="Use model.architecture=qwen3, qwen3_moe, qwen2, qwen2_moe or mixtral.",
            )
        self._check_layers("sliding_window_layers")

    def _check_layers(self, name: str) -> None:
        for layer in getattr(self, name):
            if not 0 <= layer < self.num_hidden_layers:
                raise UserError(
                    "no such layer", where=f"model.{name}", got=layer, wanted=f"0..{self.num_hidden_layers - 1}"
                )

    def _check_mixture(self) -> None:
        if not self.is_mixture:
            for name in (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
                "mlp_only_layers",
            ):
                if getattr(self, name):
                    raise UserError(
                        f"{self.architecture} is a dense architecture",
                        where=f"model.{name}",
                        got=getattr(self, name),
                        next_step="Set model.architecture=qwen3_moe, or glm4_moe for shared experts.",
                    )
            return
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{self.architecture} is a mixture of experts",
                    where=f"model.{name}",
                    got=getattr(self, name),
                    wanted="at least 1",
                )
        if self.num_experts_per_tok > self.num_experts:
            raise UserError(
                "more than there are",
                where="model.num_experts_per_tok",
                got=self.num_experts_per_tok,
                wanted=f"at most model.num_experts = {self.num_experts}",
            )
        if self.shared_expert_intermediate_size and self.architecture in ("qwen3_moe", "mixtral"):
            raise UserError(
                f"the stock {self.architecture} class has no shared expert",
                where="model.shared_expert_intermediate_size",
                got=self.shared_expert_intermediate_size,
                next_step="Set model.architecture=glm4_moe.",
            )
        if self.architecture == "qwen2_moe" and self.shared_expert_intermediate_size < 1:
            raise UserError(
                "qwen2_moe has one", where="model.shared_expert_intermediate_size", got=0, wanted="at least 1"
            )
        if self.architecture == "glm4_moe" and self.shared_expert_intermediate_size % self.moe_intermediate_size:
            raise UserError(
                "shared experts are as wide as routed ones",
                where="model.shared_expert_intermediate_size",
                got=self.shared_expert_intermediate_size,
                wanted=f"a multiple of model.moe_intermediate_size = {self.moe_intermediate_size}",
            )
        if self.routed_scaling_factor != 1 and self.architecture != "glm4_moe":
            raise UserError(
                f"the stock {self.architecture} class has no such factor",
                where="model.routed_scaling_factor",
                got=self.routed_scaling_factor,
                wanted=1,
            )
        if not self.norm_topk_prob and self.architecture == "mixtral":
            raise UserError("mixtral always renormalises", where="model.norm_topk_prob", got="false", wanted="true")
        self._check_layers("mlp_only_layers")
        leading = tuple(range(len(self.mlp_only_layers)))
        if self.architecture == "mixtral" and self.mlp_only_layers:
            raise UserError("mixtral has none", where="model.mlp_only_layers", got=self.mlp_only_layers)
        if self.architecture == "glm4_moe" and self.mlp_only_layers != leading:
            raise UserError(
                "in glm4_moe the dense layers are the first ones",
                where="model.mlp_only_layers",
                got=self.mlp_only_layers,
                wanted=leading,
            )

    @property
    def is_mixture(self) -> bool:
        return self.architecture in MIXTURES

    @property
    def normalises_heads(self) -> bool:
        if self.qk_norm == "auto":
            return self.architecture in ("qwen3", "qwen3_moe", "glm4_moe")
        return self.qk_norm == "head"

    @property
    def has_qkv_bias(self) -> bool:
        if self.attention_bias == "auto":
            return self.architecture in ("qwen2", "qwen2_moe")
        return self.attention_bias == "qkv"

    @property
    def rotary_size(self) -> int:
        """Dimensions of each head that are turned."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_dense_layer(self, layer: int) -> bool:
        return not self.is_mixture or layer in self.mlp_only_layers

    def window(self, layer: int) -> int:
        """Keys that a query of this layer sees, its own included; 0 = all before it."""
        windowed = not self.sliding_window_layers or layer in self.sliding_window_layers
        return self.sliding_window if windowed else 0

    @classmethod
    def named(cls, name: str) -> dict[str, object]:
        """The settings of a preset, by name. Raises UserError if there is none of that name."""
        from penjing.model import presets

        if not name:  # a shape that was read from weights and started from no preset
            return {"preset": ""}
        found = presets.named(name)
        if found is None:
            raise UserError(
                f"no model preset is called {name!r}", where="model.preset", next_step=suggest(name, presets.names())
            )
        return {"preset": name, **found}
