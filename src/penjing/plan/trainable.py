"""What of a model learns, and so what of the backward pass a run takes: one rule for LoRA and for frozen parameters.

Forward, every matrix costs 2 FLOPs a parameter. Backward, one that learns costs 2 for its own gradient, and every
matrix above the lowest parameter that learns costs 2 for the gradient of its input. Below that nothing is computed
backward.
"""

from __future__ import annotations

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

Place = tuple[int, int]  # (layer, how far up within it); a larger one reads what a smaller one wrote
_ATTENTION = 2  # of the scores and the mixing, which have no parameters
_WITHIN = (  # first match counts
    (re.compile(r"input_norm\."), 0),
    (re.compile(r"attention\.o_proj\."), 3),
    (re.compile(r"attention\."), 1),  # q, k, v and the norms of heads
    (re.compile(r"mlp_norm\."), 4),
    (re.compile(r".*down_proj"), 6),
    (re.compile(r"mlp\."), 5),  # gate, up, router
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainable:
    """Counts of parameters. Of matrices those that one token goes through: of a mixture the chosen experts only."""

    learns: int  # every parameter that does, matrices and others
    adapters: int = 0  # parameters of adapters
    weights: int  # of the model's own matrices, that get a gradient
    inputs: int  # of the model's own matrices, that pass a gradient on to their input
    adapter_inputs: int = 0  # of adapters', that do
    attention_from: int = 0  # first layer whose attention has a backward pass


def trainable_of(model: nn.Module, config: ModelConfig) -> Trainable:
    """Of a built model, or a module that holds it as `model` beside a head of its own."""
    parameters = [(name.removeprefix("model."), each) for name, each in model.named_parameters()]
    lowest = min(_place(name, config) for name, each in parameters if each.requires_grad)
    own = [(name, each, _active(each, config)) for name, each in _matrices(parameters, config)]
    adapters = [(name, each) for name, each in parameters if ".adapters." in name]
    return Trainable(
        learns=sum(each.numel() for _, each in parameters if each.requires_grad),
        adapters=sum(each.numel() for _, each in adapters),
        weights=sum(count for _, each, count in own if each.requires_grad),
        inputs=sum(count for name, _, count in own if _place(name, config, head=True) > lowest),
        # B reads what A wrote, which learns.
        adapter_inputs=sum(
            each.numel() for name, each in adapters if name.endswith(".B") or _place(name, config) > lowest
        ),
        attention_from=lowest[0] if lowest[1] < _ATTENTION else lowest[0] + 1,
    )


def trainable_by(config: ModelConfig, lora: Lora, patterns: tuple[str, ...]) -> Trainable | None:
    """Of a run's settings, without any weights; None: everything learns."""
    return _by(config, lora, patterns) if lora.rank or patterns else None


@lru_cache(maxsize=64)
def _by(config: ModelConfig, lora: Lora, patterns: tuple[str, ...]) -> Trainable:
    with torch.device("meta"):
        model = Transformer(config)
    if lora.rank:
        # DoRA's magnitudes are taken from weights, of which are none
        add_adapter(model, replace(lora, use_dora=False), seed=0)
    freeze(model, patterns)
    found = trainable_of(model, config)
    if not lora.use_dora:
        return found
    magnitudes = sum(each.shape[0] for name, each in model.named_parameters() if name.endswith(".B"))
    return replace(found, learns=found.learns + magnitudes)


def _matrices(
    parameters: Iterable[tuple[str, nn.Parameter]], config: ModelConfig
) -> Iterable[tuple[str, nn.Parameter]]:
    """Those that enter a matmul, the head among them; a tied one is the embedding."""
    for name, each in parameters:
        table = name.startswith("embed.") and not config.tie_word_embeddings
        beside = ".adapters." in name or not name.startswith(("embed.", "blocks.", "head."))
        if each.ndim >= 2 and not table and not beside:
            yield name, each


def _active(parameter: nn.Parameter, config: ModelConfig) -> int:
    """Values that one token is multiplied with: of experts, which lie in one tensor, those it is sent to."""
    count = parameter.numel()
    return count * config.num_experts_per_tok // config.num_experts if parameter.ndim == 3 else count


def _place(name: str, config: ModelConfig, *, head: bool = False) -> Place:
    """Where a parameter is read first. head: of a tied table, where it is multiplied with."""
    found = re.match(r"blocks\.(\d+)\.(.*)", name)
    if found is None:
        if name.startswith("embed.") and not head:
            return -1, 0
        return config.num_hidden_layers, 0 if name.startswith("norm.") else 1
    within = next(place for pattern, place in _WITHIN if pattern.match(found[2]))
    return int(found[1]), within
