"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from penjing.base.config import NonNegativeFloat, NonNegativeInt, Settings

_GREEDY_BELOW = 1e-6  # smaller temperatures make infinite logits, and no chance can be had from those


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """How the next token is drawn. temperature 0 takes the most likely one (greedy)."""

    temperature: NonNegativeFloat = 0.0  # logits are divided by it; below 1e-6 it is taken as 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # draw from the smallest set of tokens that holds this much probability
    top_k: NonNegativeInt = 0  # draw from the k most likely (and what equals the last of them); 0 = all

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


def shape(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """logits_BV of what is drawn from: divided by the temperature, and -inf where top_k and top_p leave out a token.

    With both, top_p is taken of what top_k left. The temperature must not be that of greedy text.
    """
    logits_BV = logits_BV.float() / sampling.temperature
    if sampling.top_k:
        lowest_B1 = logits_BV.topk(min(sampling.top_k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < lowest_B1, float("-inf"))
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        chance_BV = sorted_BV.softmax(dim=-1)
        # A token stays if the more likely ones together hold less than top_p: the first always does.
        dropped_BV = chance_BV.cumsum(dim=-1) - chance_BV >= sampling.top_p
        logits_BV = logits_BV.masked_fill(dropped_BV.scatter(-1, order_BV, dropped_BV), float("-inf"))
    return logits_BV


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """The next id of each row, id_B."""
    if sampling.is_greedy:
        return logits_BV.argmax(dim=-1)
    return torch.multinomial(shape(logits_BV, sampling).softmax(dim=-1), 1, generator=generator)[:, 0]
