"""The trainable part of a model, and the backward pass it needs: one rule for LoRA and for frozen parameters.

Forward, every matrix costs 2 FLOPs per parameter. Backward, a trainable matrix costs 2 for its weight gradient, and
every matrix above the lowest trainable parameter costs 2 for its input gradient. Below it there is no backward pass.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from penjing.model.config import ModelConfig
from penjing.model.freeze import freeze
from penjing.model.lora import Lora, add_adapter
from penjing.model.transformer import Transformer

Depth = tuple[int, int]  # (layer, order within the layer); data flows from smaller to larger
_ATTENTION_DEPTH = 2  # of scores and mixing, which have no parameters
_DEPTH_IN_LAYER = (  # first match counts
    (re.compile(r"input_norm\."), 0),
    (re.compile(r"attention\.o_proj\."), 3),
    (re.compile(r"attention\."), 1),  # q, k, v and the norms of heads
    (re.compile(r"mlp_norm\."), 4),
    (re.compile(r".*down_proj"), 6),
    (re.compile(r"mlp\."), 5),  # gate, up, router
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainable:
    """Parameter counts. Of matrices only those that one token uses: in a MoE model the chosen experts."""

    num_trainable: int  # all trainable parameters, matrices and others
    adapters: int = 0  # parameters of adapters
    weights: int  # in base-model matrices with a weight gradient
    inputs: int  # in base-model matrices with an input gradient
    adapter_inputs: int = 0  # in adapter matrices with an input gradient
    attention_from: int = 0  # first layer whose attention has a backward pass


def trainable_of(model: nn.Module, config: ModelConfig) -> Trainable:
    """For a built model, or a module that holds it as `model` and adds a head."""
    parameters = [(name.removeprefix("model."), parameter) for name, parameter in model.named_parameters()]
    lowest = min(_depth(name, config) for name, parameter in parameters if parameter.requires_grad)
    matrices = [(name, parameter, _active(parameter, config)) for name, parameter in _matrices(parameters, config)]
    adapters = [(name, parameter) for name, parameter in parameters if ".adapters." in name]
    return Trainable(
        num_trainable=sum(parameter.numel() for _, parameter in parameters if parameter.requires_grad),
        adapters=sum(parameter.numel() for _, parameter in adapters),
        weights=sum(count for _, parameter, count in matrices if parameter.requires_grad),
        inputs=sum(count for name, _, count in matrices if _depth(name, config, head=True) > lowest),
        # B always has an input gradient: A, which is trainable, produces its input.
        adapter_inputs=sum(
            parameter.numel() for name, parameter in adapters if name.endswith(".B") or _depth(name, config) > lowest
        ),
        attention_from=lowest[0] if lowest[1] < _ATTENTION_DEPTH else lowest[0] + 1,
    )


def trainable_from_settings(config: ModelConfig, lora: Lora, patterns: tuple[str, ...]) -> Trainable | None:
    """From a run's settings, without weights; None: everything is trainable."""
    return _trainable_on_meta(config, lora, patterns) if lora.rank or patterns else None


@lru_cache(maxsize=64)
def _trainable_on_meta(config: ModelConfig, lora: Lora, patterns: tuple[str, ...]) -> Trainable:
    with torch.device("meta"):
        model = Transformer(config)
    if lora.rank:
        # DoRA's magnitudes need weights, which the meta device lacks
        add_adapter(model, replace(lora, use_dora=False), seed=0)
    freeze(model, patterns)
    trainable = trainable_of(model, config)
    if not lora.use_dora:
        return trainable
    magnitudes = sum(each.shape[0] for name, each in model.named_parameters() if name.endswith(".B"))
    return replace(trainable, num_trainable=trainable.num_trainable + magnitudes)


def _matrices(
    parameters: Iterable[tuple[str, nn.Parameter]], config: ModelConfig
) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters that enter a matmul, including the head; a tied head is the embedding."""
    for name, parameter in parameters:
        embedding_only = name.startswith("embed.") and not config.tie_word_embeddings
        added = ".adapters." in name or not name.startswith(("embed.", "blocks.", "head."))
        if parameter.ndim >= 2 and not embedding_only and not added:
            yield name, parameter


def _active(parameter: nn.Parameter, config: ModelConfig) -> int:
    """Number of parameters that one token uses: of stacked experts (one tensor), those it is routed to."""
    count = parameter.numel()
    return count * config.num_experts_per_tok // config.num_experts if parameter.ndim == 3 else count


def _depth(name: str, config: ModelConfig, *, head: bool = False) -> Depth:
    """Depth at which a parameter is first used. head: for a tied embedding, its use as the head."""
    match = re.match(r"blocks\.(\d+)\.(.*)", name)
    if match is None:
        if name.startswith("embed.") and not head:
            return -1, 0
        return config.num_hidden_layers, 0 if name.startswith("norm.") else 1
    within = next(depth for pattern, depth in _DEPTH_IN_LAYER if pattern.match(match[2]))
    return int(match[1]), within
