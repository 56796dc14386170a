"""The decoder, in a straight line: embed, L blocks, norm, head."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penjing.kernels import fused_linear_cross_entropy as head
from penjing.model.attention import sight
from penjing.model.block import Block
from penjing.model.cache import Cache
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear
from penjing.model.moe import RouterMeans, mean_of_layers
from penjing.model.norm import RMSNorm
from penjing.model.rope import rotary_table

Recompute = Literal["none", "mlp", "block"]
# hidden_ND, weight_VD of the head, dtype of its products -> what an objective wants of them (see
# kernels/fused_distillation_loss.py)
Score = Callable[[Tensor, Tensor, torch.dtype], Tensor]


class Transformer(nn.Module):
    """A decoder equal to the stock `transformers` class of its `config.architecture`.

    Parameters are float32; matrix products run in `compute_dtype` (see model/linear.py).
    """

    compute_dtype: torch.dtype | None = None
    recompute: Recompute = "none"  # see `recompute_activations`
    head_cast: Tensor | None = None  # the head's weight in its products' dtype (see `keep_casts`)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.head = Linear(config.hidden_size, config.vocabulary_size) if config.embeddings == "untied" else None

    @property
    def head_weight_VD(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None = None,
        cache: Cache | None = None,
        *,
        branch_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
    ) -> Tensor:
        """hidden_BTD after the last norm.

        ids_BT: token ids. document_BT: which document each position belongs to (None: each row is one document).
        cache: keys and values of earlier positions; these tokens are appended to every row, each of which is one
        document, and must find room there.
        branch_BT, position_BT: where documents part into branches after a common beginning (see `branch_mask`); the
        position of each token in its own branch.
        """
        return self._hidden(ids_BT, document_BT, cache, branch_BT, position_BT)[0]

    def _hidden(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None,
        cache: Cache | None,
        branch_BT: Tensor | None,
        position_BT: Tensor | None,
        edge_S: Tensor | None = None,
    ) -> tuple[Tensor, RouterMeans | None]:
        """hidden_BTD, and what the routers of all layers did together."""
        assert cache is None or document_BT is None, "a cached row is one document"
        assert (branch_BT is None) == (position_BT is None), "branches have positions of their own"
        num_tokens = ids_BT.shape[1]
        if position_BT is None:
            position_BT = (
                torch.arange(num_tokens, device=ids_BT.device)[None] if cache is None else cache.positions(num_tokens)
            )
        windows = sorted({self.config.window(layer) for layer in range(self.config.num_layers)})
        dtype, config = self.compute_dtype or self.embed.weight.dtype, self.config
        sights = {
            window: sight(position_BT, document_BT, branch_BT, edge_S, cache, window, config, dtype)
            for window in windows
        }
        rotary = rotary_table(position_BT, self.config)
        x_BTD = self.embed(ids_BT)
        routers: list[RouterMeans] = []
        for layer, block in enumerate(self.blocks):
            seen = sights[self.config.window(layer)]
            given = (x_BTD, rotary, seen, cache, position_BT, document_BT)
            if self.recompute == "block" and torch.is_grad_enabled():
                # A block draws nothing (runs with adapters' dropout are refused): no random state need be kept.
                x_BTD, router = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD, router = block(*given)
            if router is not None:
                routers.append(router)
        if cache is not None:
            cache.length_B += num_tokens
        return self.norm(x_BTD), mean_of_layers(routers) if routers else None

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """logits_BTV in float32, for any leading shape."""
        kept = None if torch.is_grad_enabled() else self.head_cast
        return head.logits(hidden_BTD, self.head_weight_VD if kept is None else kept, self._head_dtype)

    @property
    def _head_dtype(self) -> torch.dtype:
        return self.compute_dtype or self.head_weight_VD.dtype

    def forward(
        self,
        ids_BT: Tensor,
        document_BT: Tensor | None = None,
        *,
        scored_N: Tensor | None = None,
        target_N: Tensor | None = None,
        weight_N: Tensor | None = None,
        cache: Cache | None = None,
        branch_BT: Tensor | None = None,
        position_BT: Tensor | None = None,
        edge_S: Tensor | None = None,
        temperature: float = 1.0,
        score: Score | None = None,
    ) -> Tensor | tuple[Tensor, RouterMeans]:
        """logits_BTV in float32; given targets, logp_2N; given weights too, the weighted sum of nats.

        logp_2N: in float32, the log-probability of each target, and beside it the entropy of that prediction in nats,
        without a gradient.

        edge_S: where documents begin, for CUDA's variable-length kernel (loader/batch.py); without it a mask does.

        temperature: logits are divided by it before logp_2N is taken.

        score: given instead of targets, it makes of the hidden states what is returned in place of the nats.

        A mixture of experts that is being trained returns beside the nats what its routers did.

        scored_N: flat indices (row * T + position) that reach the head, the same one more than once where branches
        part; target_N: the id each should predict; weight_N: what each counts. The loss is taken inside so that a
        wrapped (DDP, FSDP) model stays one callable.
        """
        hidden_BTD, routers = self._hidden(ids_BT, document_BT, cache, branch_BT, position_BT, edge_S)
        if target_N is None and score is None:
            return self.logits(hidden_BTD)
        hidden_ND = hidden_BTD.flatten(0, 1)
        if scored_N is not None:
            hidden_ND = hidden_ND[scored_N]
        if target_N is None:
            assert score is not None
            scores = score(hidden_ND, self.head_weight_VD, self._head_dtype)
        elif weight_N is None:
            if temperature != 1.0:
                hidden_ND = hidden_ND / temperature  # the head is linear and has no bias
            scores = head.log_probs(hidden_ND, self.head_weight_VD, target_N, self._head_dtype)
        else:
            scores = head.summed_nats(hidden_ND, self.head_weight_VD, target_N, weight_N, self._head_dtype)
        return scores if routers is None else (scores, routers)


@contextmanager
def keep_casts(model: Transformer) -> Iterator[None]:
    """For writing: weights on a CPU are cast to `compute_dtype` once, not for every product without gradients, so that
    a token takes little longer than its weights to be read; they must not change meanwhile. And nothing compiled is
    used, which would be compiled again for every length."""
    layers = [layer for layer in model.modules() if type(layer) is Linear and layer is not model.head]
    mine = [layer for layer in layers if layer.cast is None and _is_cast(layer.weight, layer.compute_dtype)]
    has_head = model.head_cast is None and _is_cast(model.head_weight_VD, model.compute_dtype)
    for layer in mine:
        layer.cast = layer.weight.detach().to(layer.compute_dtype)
    if has_head:
        model.head_cast = model.head_weight_VD.detach().to(model.compute_dtype)
    # What was never loaded has compiled nothing, and takes seconds to load.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with stance:
            yield
    finally:
        for layer in mine:
            layer.cast = None
        model.head_cast = None if has_head else model.head_cast


def _is_cast(weight: Tensor, dtype: torch.dtype | None) -> bool:
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and dtype not in (None, weight.dtype)


def recompute_activations(model: Transformer, what: Recompute) -> None:
    """Make activations again in the backward pass instead of keeping them: of every MLP (half of a dense block's
    memory for a fifth of its time), or of whole blocks (all but their inputs, for a third)."""
    model.recompute = what
    for block in model.blocks:
        assert isinstance(block, Block)
        block.recompute_mlp = what == "mlp"
