"""The decoder (arXiv:1706.03762, the decoder half; arXiv:2302.13971, section 2.2), in order: embedding, L blocks,
norm, head."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penjing.kernels import ops
from penjing.model.block import Block
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear
from penjing.model.moe import RouterStats, mean_of_layers
from penjing.model.norm import RMSNorm
from penjing.model.regularization import Regularization, branch_noise
from penjing.model.rope import rotary_table
from penjing.model.score import Score

Recompute = Literal["none", "mlp", "block"]


class Transformer(nn.Module):
    """A decoder equal to the stock `transformers` class of its `config.architecture`. Parameters are float32; matmuls
    run in `compute_dtype` (see model/linear.py)."""

    compute_dtype: torch.dtype | None = None
    recompute: Recompute = "none"  # see `recompute_activations`
    regularization = Regularization()  # of training passes, which have seeds

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size) if not config.tie_word_embeddings else None

    @property
    def head_weight_VD(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None = None,
        cache: Cache | None = None,
        *,
        subtree_end_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
    ) -> Tensor:
        """hidden_BTD after the last norm.

        ids_BT: token ids. document_BT: the document of each position (None: each row is one document).
        cache: keys and values of earlier positions; these tokens are appended to every row, each of which is one
        document, and must fit.
        subtree_end_BT, position_BT: for rows that hold trees (see `tree_mask`); the depth of each token in its tree.
        """
        return self._hidden(ids_BT, document_BT, cache, subtree_end_BT, position_BT)[0]

    def _hidden(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None,
        cache: Cache | None,
        subtree_end_BT: Tensor | None,
        position_BT: Tensor | None,
        noise_B: Tensor | None = None,
        **more: Tensor,
    ) -> tuple[Tensor, RouterStats | None]:
        """hidden_BTD, and the router statistics of all layers."""
        assert cache is None or document_BT is None, "a cached row is one document"
        assert (subtree_end_BT is None) == (position_BT is None), "trees have positions of their own"
        num_tokens = ids_BT.shape[1]
        if position_BT is None:
            position_BT = (
                torch.arange(num_tokens, device=ids_BT.device)[None] if cache is None else cache.positions(num_tokens)
            )
        config = self.config
        windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
        metadata = {
            window: ops.make_attention_metadata(
                position_BT=position_BT,
                document_BT=document_BT,
                heads=(config.num_key_value_heads, config.head_dim),
                dtype=self.compute_dtype or self.embed.weight.dtype,
                window=window,
                subtree_end_BT=subtree_end_BT,
                cache_tokens=0 if cache is None else cache.max_tokens,
                **more,
            )
            for window in sorted(set(windows))
        }
        rotary = rotary_table(position_BT, config)
        x_BTD = self.embed(ids_BT)
        noises = branch_noise(self.regularization.dropout, noise_B, len(windows), num_tokens)
        routers: list[RouterStats] = []
        for window, block, noise in zip(windows, self.blocks, noises, strict=True):
            inputs = (x_BTD, rotary, metadata[window], cache, position_BT, document_BT, noise)
            if self.recompute == "block" and torch.is_grad_enabled():
                # Noise is an input, and adapters with dropout are refused: the random state need not be saved.
                x_BTD, router = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD, router = block(*inputs)
            if router is not None:
                routers.append(router)
        if cache is not None:
            cache.length_B += num_tokens
        return self.norm(x_BTD), mean_of_layers(routers) if routers else None

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """logits_BTV in float32, for any leading shape."""
        return ops.logits(hidden_BTD, self.head_weight_VD, self._head_dtype)

    @property
    def _head_dtype(self) -> torch.dtype:
        return self.compute_dtype or self.head_weight_VD.dtype

    def forward(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None = None,
        *,
        score: Score | None = None,
        scored_N: Tensor | None = None,
        cache: Cache | None = None,
        subtree_end_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        **more: Tensor,
    ) -> Tensor | tuple[Tensor, RouterStats]:
        """logits_BTV in float32; with a `score` (model/score.py), its result instead.

        scored_N: flat indices (row * T + position) of the scored positions, repeated where branches start; None: all.
        more: `noise_B` (model/regularization.py) and further inputs of `ops.make_attention_metadata`. With gradients, a
        mixture of experts returns (score, router statistics).
        """
        hidden_BTD, routers = self._hidden(ids_BT, document_BT, cache, subtree_end_BT, position_BT, **more)
        if score is None:
            return self.logits(hidden_BTD)
        hidden_ND = hidden_BTD.flatten(0, 1)
        if scored_N is not None:
            hidden_ND = hidden_ND[scored_N]
        scores = score(hidden_ND, self.head_weight_VD, self._head_dtype)
        return scores if routers is None else (scores, routers)


def recompute_activations(model: Transformer, what: Recompute) -> None:
    """Activation checkpointing: of every MLP (saves half of a dense block's activation memory, costs a fifth of its
    time), or of whole blocks (saves all but their inputs, costs a third)."""
    model.recompute = what
    for block in model.blocks:
        assert isinstance(block, Block)
        block.recompute_mlp = what == "mlp"
