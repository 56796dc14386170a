"""Matrix sizes of a model, as a plan needs them: from our config, or from any Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.plan.flops import parameters


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder of `layers` blocks. Sizes count values, not bytes."""

    layers: int
    width: int  # D, of the residual stream
    heads: int
    query_size: int  # H x K, all query heads together
    key_size: int  # G x K, all key heads together
    intermediate_size: int  # F, of a dense block
    mlp_matrices: int  # 3 with a gate (SwiGLU), 2 without
    vocabulary: int
    parameters: int  # all of them
    windows: tuple[int, ...] = ()  # attention window of each layer; 0 = none; empty: none in any layer
    mlp_only_layers: int = -1  # number of layers with a dense MLP; -1 = all
    experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_size: int = 0  # F, summed over the shared experts

    @property
    def num_dense(self) -> int:
        return self.layers if self.mlp_only_layers < 0 else self.mlp_only_layers

    @property
    def block_matrices(self) -> int:
        """Parameters of the matrices that one token uses, in all blocks: M without the head."""
        attention = self.layers * self.width * (2 * self.query_size + 2 * self.key_size)
        dense = self.num_dense * self.mlp_matrices * self.width * self.intermediate_size
        active_size = self.num_experts_per_tok * self.moe_intermediate_size + self.shared_size
        mixture = (self.layers - self.num_dense) * (3 * self.width * active_size + self.width * self.experts)
        return attention + dense + mixture

    @property
    def matrices(self) -> int:
        """The same with the output head."""
        return self.block_matrices + self.width * self.vocabulary

    def matrices_read(self, tokens: int) -> float:
        """The same, with every expert that any of `tokens` tokens uses. With uniform routing the mean number of experts
        is E (1 - (1 - k / E)^N)."""
        if not self.experts:
            return self.matrices
        active_experts = self.experts * (1 - (1 - self.num_experts_per_tok / self.experts) ** tokens)
        extra = (active_experts - self.num_experts_per_tok) * 3 * self.width * self.moe_intermediate_size
        return self.matrices + (self.layers - self.num_dense) * extra


def shape_of(config: ModelConfig) -> Shape:
    """The shape of a Penjing model."""
    layers = config.num_hidden_layers
    return Shape(
        layers=layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        query_size=config.num_attention_heads * config.head_dim,
        key_size=config.num_key_value_heads * config.head_dim,
        intermediate_size=config.intermediate_size,
        mlp_matrices=3,
        vocabulary=config.vocab_size,
        parameters=parameters(config).total,
        windows=tuple(config.window(layer) for layer in range(layers)) if config.sliding_window else (),
        mlp_only_layers=sum(config.is_dense_layer(layer) for layer in range(layers)),
        experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_size=config.shared_expert_intermediate_size,
    )


_PLAIN_MLP = ("gpt2", "gpt_neox", "gpt_neo", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2", "codegen", "gptj")


def shape_from_hf(config: Mapping[str, Any], where: object) -> Shape:
    """The shape in a Hugging Face `config.json`, including classes we cannot train. Raises UserError if it has none.

    Only fields that affect time and memory are read. Parameters include matrices, norms and learned positions.
    """

    def first(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise UserError("not a model's config.json", where=where, wanted=f"a whole number for {names[0]!r}")
        return default

    kind = str(config.get("model_type", ""))
    width = first("hidden_size", "n_embd", "d_model")
    layers = first("num_hidden_layers", "n_layer", "n_layers")
    heads = first("num_attention_heads", "n_head", "n_heads")
    head_dim = first("head_dim", default=max(1, width // heads))
    inner = first("intermediate_size", "n_inner", "ffn_dim", default=first("expansion_ratio", default=4) * width)
    experts = first("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_size = first("moe_intermediate_size", default=inner)
    shared = first("shared_expert_intermediate_size", default=0) + first("n_shared_experts", default=0) * expert_size
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    shape = Shape(
        layers=layers,
        width=width,
        heads=heads,
        query_size=heads * head_dim,
        key_size=first("num_key_value_heads", default=heads) * head_dim,
        intermediate_size=inner,
        mlp_matrices=2 if kind in _PLAIN_MLP else 3,
        vocabulary=first("vocab_size", "padded_vocab_size"),
        parameters=0,
        windows=(window,) * layers if isinstance(window, int) and window > 0 else (),
        mlp_only_layers=first("first_k_dense_replace", default=0) if experts else layers,
        experts=experts,
        num_experts_per_tok=first("num_experts_per_tok", default=2 if experts else 0),
        moe_intermediate_size=expert_size if experts else 0,
        shared_size=shared if experts else 0,
    )
    tied = config.get("tie_word_embeddings", kind in ("gpt2", "opt", "bloom", "mpt", "gemma", "gemma2", "gemma3"))
    embeddings = width * shape.vocabulary * (1 if tied else 2)
    embeddings += width * first("n_positions", "max_position_embeddings", default=0) if kind in ("gpt2", "opt") else 0
    vectors = layers * width * (13 if kind == "gpt2" else 2) + width * (2 if kind == "gpt2" else 1)
    idle = (layers - shape.num_dense) * 3 * width * (experts - shape.num_experts_per_tok) * shape.moe_intermediate_size
    return replace(shape, parameters=embeddings + shape.block_matrices + idle + vectors)
