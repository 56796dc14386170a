"""The configuration of a model. Every architecture equals a stock `transformers` class."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from penjing.base.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Settings
from penjing.base.errors import UserError, suggest

MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings, section="model"):
    """Shape of a decoder: pre-norm RMSNorm, grouped-query attention, rotary positions, SwiGLU or mixture of experts."""

    preset: str = "26m"  # the named shape that the other settings start from; see penjing/model/presets.py
    # Differences: qwen3 and glm4_moe have an RMSNorm on each query and key head; llama and mixtral have none; qwen2 has
    # q, k and v biases instead. Mixtures of experts: glm4_moe has shared experts and a sigmoid router balanced by bias;
    # qwen3_moe and mixtral have a softmax router and no shared expert; qwen2_moe has one gated shared expert.
    architecture: Literal["qwen3", "qwen2", "llama", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe"] = "qwen3"
    vocab_size: PositiveInt = 6400  # V, token ids; at least as many as the tokenizer has
    hidden_size: PositiveInt = 512  # D, width of the residual stream
    num_hidden_layers: Annotated[int, Ge(1), Le(10_000)] = 8  # decoder blocks
    num_attention_heads: PositiveInt = 8  # H, query heads
    num_key_value_heads: PositiveInt = 2  # G, key/value heads; H / G query heads share one
    head_dim: PositiveInt = 64  # K, width of one head
    intermediate_size: PositiveInt = 1408  # F, SwiGLU's inner width in dense layers
    max_position_embeddings: PositiveInt = 32768  # longest sequence the model is meant for
    rms_norm_eps: PositiveFloat = 1e-5  # added to the mean square in RMSNorm
    tie_word_embeddings: bool = True  # whether the output head is the embedding table
    qk_norm: Literal["auto", "head", "none"] = "auto"  # RMSNorm of each query and key head; auto: as the class
    attention_bias: Literal["auto", "qkv", "none"] = "auto"  # added to queries, keys, values; auto: as the class

    rope_theta: Annotated[float, Gt(1), Lt(math.inf)] = 1e6  # base of the rotary frequencies (arXiv:2104.09864)
    partial_rotary_factor: float = 1.0  # fraction of each head that is rotated; the rest carries no position
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"  # for positions beyond the original length
    rope_factor: Annotated[float, Ge(1), Lt(math.inf)] = 1.0  # new length / original length
    rope_original_max_position_embeddings: NonNegativeInt = 0  # longest sequence before scaling (yarn, llama3)
    rope_beta_fast: PositiveFloat = 32.0  # yarn: frequencies with more rotations in the original length are unchanged
    rope_beta_slow: PositiveFloat = 1.0  # yarn: frequencies with fewer rotations are divided by the factor
    rope_low_freq_factor: PositiveFloat = 1.0  # llama3: its name for rope_beta_slow
    rope_high_freq_factor: PositiveFloat = 4.0  # llama3: its name for rope_beta_fast
    rope_attention_factor: NonNegativeFloat = 0.0  # yarn: scale of queries and keys; 0 = 0.1 ln(factor) + 1

    sliding_window: NonNegativeInt = 0  # keys that a query of a windowed layer attends to, its own included; 0 = all
    sliding_window_layers: tuple[int, ...] = ()  # the windowed layers, from 0; empty: every layer if there is a window

    num_experts: int = 0  # E, routed experts of a layer; 0 = dense
    num_experts_per_tok: int = 0  # k, routed experts of each token
    moe_intermediate_size: int = 0  # inner width of one routed expert
    # total inner width of the shared experts, which process every token; 0 = none
    shared_expert_intermediate_size: NonNegativeInt = 0
    mlp_only_layers: tuple[int, ...] = ()  # layers, from 0, that have an MLP of intermediate_size instead of experts
    norm_topk_prob: bool = True  # whether the k experts' weights are divided by their sum
    routed_scaling_factor: PositiveFloat = 1.0  # glm4_moe: the routed experts' sum is multiplied by this

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads:
            what = "query heads must be a whole multiple of key/value heads"
            raise self.error("num_attention_heads", what, got=f"{heads} over {self.num_key_value_heads}")
        if self.architecture == "llama" and self.hidden_size % heads:
            what = "the stock llama class wants a width that is divisible by its heads"
            raise self.error("hidden_size", what, wanted=f"a multiple of model.num_attention_heads = {heads}")
        if self.head_dim % 2:
            raise self.error("head_dim", "rotary positions need an even width")
        self._check_positions()
        self._check_mixture()

    def _check_positions(self) -> None:
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_size % 2:
            got = f"{self.partial_rotary_factor} of {self.head_dim}"
            raise self.error("partial_rotary_factor", "must give an even number of rotated dimensions", got=got)
        if self.rope_scaling == "none" and self.rope_factor != 1:
            next_step = "Set model.rope_scaling=yarn (or linear, llama3)."
            raise self.error("rope_factor", "has no effect without model.rope_scaling", next_step=next_step)
        if self.rope_scaling in ("yarn", "llama3") and self.rope_original_max_position_embeddings < 1:
            raise self.error(
                "rope_original_max_position_embeddings",
                "the length before scaling is needed",
                wanted="the max_position_embeddings of the model before scaling",
            )
        if self.sliding_window_layers and not self.sliding_window:
            raise self.error("sliding_window_layers", "has no effect without model.sliding_window")
        if self.rope_scaling == "llama3" and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            wanted = f"more than model.rope_low_freq_factor = {self.rope_low_freq_factor}"
            raise self.error("rope_high_freq_factor", "must exceed the low factor", wanted=wanted)
        if self.sliding_window and self.architecture in ("llama", "glm4_moe"):
            next_step = "Use model.architecture=qwen3, qwen3_moe, qwen2, qwen2_moe or mixtral."
            raise self._unsupported("sliding_window", "sliding window", next_step=next_step)
        self._check_layers("sliding_window_layers")

    def _check_layers(self, name: str) -> None:
        for layer in getattr(self, name):
            if not 0 <= layer < self.num_hidden_layers:
                raise self.error(name, "no such layer", got=layer, wanted=f"0..{self.num_hidden_layers - 1}")

    def _unsupported(self, name: str, thing: str, **more: Any) -> UserError:
        return self.error(name, f"the stock {self.architecture} class has no {thing}", **more)

    def _check_mixture(self) -> None:
        sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if not self.is_mixture:
            for name in (*sizes, "shared_expert_intermediate_size", "mlp_only_layers"):
                if getattr(self, name):
                    next_step = "Set model.architecture=qwen3_moe, or glm4_moe for shared experts."
                    raise self.error(name, f"{self.architecture} is a dense architecture", next_step=next_step)
            return
        for name in sizes:
            # transformers' Glm4MoeTopkRouter scores a group of experts by its best two.
            least = 2 if name == "num_experts" and self.architecture == "glm4_moe" else 1
            if getattr(self, name) < least:
                raise self.error(name, f"{self.architecture} is a mixture of experts", wanted=f"at least {least}")
        if self.num_experts_per_tok > self.num_experts:
            wanted = f"at most model.num_experts = {self.num_experts}"
            raise self.error("num_experts_per_tok", "more than there are", wanted=wanted)
        self._check_layers("mlp_only_layers")
        self._check_stock_class()

    def _check_stock_class(self) -> None:
        """Raise UserError for settings that the `transformers` class of a mixture does not have."""
        shared, routed = self.shared_expert_intermediate_size, self.moe_intermediate_size
        if shared and self.architecture in ("qwen3_moe", "mixtral"):
            next_step = "Set model.architecture=glm4_moe."
            raise self._unsupported("shared_expert_intermediate_size", "shared expert", next_step=next_step)
        if not shared and self.architecture == "qwen2_moe":
            raise self.error("shared_expert_intermediate_size", "qwen2_moe has one", wanted="at least 1")
        if self.routed_scaling_factor != 1 and self.architecture != "glm4_moe":
            raise self._unsupported("routed_scaling_factor", "such factor", wanted=1)
        if self.architecture == "mixtral":
            if not self.norm_topk_prob:
                raise self.error("norm_topk_prob", "mixtral always renormalises", got="false", wanted="true")
            if self.mlp_only_layers:
                raise self.error("mlp_only_layers", "mixtral has none")
        if self.architecture == "glm4_moe":
            if shared % routed:
                wanted = f"a multiple of model.moe_intermediate_size = {routed}"
                what = "shared experts are as wide as routed ones"
                raise self.error("shared_expert_intermediate_size", what, wanted=wanted)
            leading = tuple(range(len(self.mlp_only_layers)))
            if self.mlp_only_layers != leading:
                raise self.error("mlp_only_layers", "in glm4_moe the dense layers are the first ones", wanted=leading)

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
        """Rotated dimensions of each head."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_dense_layer(self, layer: int) -> bool:
        return not self.is_mixture or layer in self.mlp_only_layers

    def window(self, layer: int) -> int:
        """Keys that a query of this layer attends to, its own included; 0 = all before it."""
        windowed = not self.sliding_window_layers or layer in self.sliding_window_layers
        return self.sliding_window if windowed else 0

    @classmethod
    def named(cls, name: str) -> dict[str, object]:
        """The settings of a preset, by name. Raises UserError if there is none of that name."""
        from penjing.model import presets

        if not name:  # a shape that was read from weights, not from a preset
            return {"preset": ""}
        preset = presets.named(name)
        if preset is None:
            raise UserError(
                f"no model preset is called {name!r}", where="model.preset", next_step=suggest(name, presets.names())
            )
        return {"preset": name, **preset}
