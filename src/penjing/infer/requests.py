"""What is asked of the batched sampler, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from penjing.infer.sample import Sampling, shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and one seed for each answer that is wanted."""

    prompt: Sequence[int]
    seeds: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer. ids: with the stop id where it ended with one. logp: of each token under the whole softmax at the
    temperature asked for; drawn_logp: under the distribution it was drawn from (0 for greedy text).

    Of several turns, ids holds also what was given between them, with log-probabilities 0; said: whether the model said
    the token, None if it said all; notes: those of `InjectedTokens`, one for each turn but the last."""

    ids: list[int]
    logp: list[float]
    drawn_logp: list[float]
    ended: Literal["stop", "length"]
    said: list[bool] | None = None
    notes: tuple[Any, ...] = ()


class Turn(NamedTuple):
    """A turn that the model ended: of which request and answer, the how manyth of it from 1, its ids with the stop."""

    request: int
    answer: int
    number: int
    ids: list[int]


class InjectedTokens(NamedTuple):
    """What is read before the next turn. note: kept with the answer."""

    ids: Sequence[int]
    note: Any


class SampledTokens(NamedTuple):
    """One token of each row."""

    id_B: Tensor
    logp_B: Tensor
    drawn_logp_B: Tensor


def draw(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling, score_temperature: float = 1.0) -> SampledTokens:
    """The token at `uniform_B` (0 to 1, float32 with 24 bits) of the cumulated probabilities, in the order of ids."""
    if sampling.is_greedy:
        id_B = logits_BV.argmax(dim=-1)
        drawn_logp_B = torch.zeros_like(uniform_B)
    else:
        shaped_BV = shape(logits_BV, sampling)
        top_B1, likeliest_B1 = shaped_BV.max(dim=-1, keepdim=True)
        # Left-out tokens add nothing, so the first sum above the target is never theirs; and u x total < total.
        # Where parts of the sum are taken side by side, as on CUDA, it may go down by a rounding error, and neither is
        # certain: the likeliest token stands in.
        sums_BV = (shaped_BV - top_B1).exp_().cumsum(dim=-1)
        total_B1 = sums_BV[:, -1:]
        id_B1 = torch.searchsorted(sums_BV, uniform_B[:, None] * total_B1, right=True).clamp_(max=sums_BV.shape[1] - 1)
        id_B1 = torch.where(shaped_BV.gather(1, id_B1) > -torch.inf, id_B1, likeliest_B1)
        id_B = id_B1[:, 0]
        drawn_logp_B = (shaped_BV.gather(1, id_B1) - top_B1 - total_B1.log())[:, 0]
        whole = sampling.top_p == 1 and sampling.top_k == 0
        if whole and sampling.temperature == score_temperature:
            return SampledTokens(id_B, drawn_logp_B, drawn_logp_B)
    scaled_BV = logits_BV if score_temperature == 1 else logits_BV / score_temperature
    logp_B = scaled_BV.gather(1, id_B[:, None])[:, 0] - scaled_BV.logsumexp(dim=-1)
    return SampledTokens(id_B, logp_B, drawn_logp_B)
