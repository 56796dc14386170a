"""From logits to the next token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.base.errors import UserError

_GREEDY_BELOW = 1e-6  # smaller temperatures make infinite logits, and no chance can be had from those


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. temperature 0 takes the most likely one (greedy)."""

    temperature: float = 0.0  # logits are divided by it; below 1e-6 it is taken as 0
    top_p: float = 1.0  # draw from the smallest set of tokens that holds this much probability
    top_k: int = 0  # draw from the k most likely (and what equals the last of them); 0 = all

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError("out of range", where="temperature", got=self.temperature, wanted="0 or more")
        if not 0 < self.top_p <= 1:
            raise UserError("out of range", where="top_p", got=self.top_p, wanted="more than 0, at most 1")
        if self.top_k < 0:
            raise UserError("negative", where="top_k", got=self.top_k, wanted="0 or more")

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
