"""Matrix sizes of a model, as a plan needs them."""

from dataclasses import dataclass

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
