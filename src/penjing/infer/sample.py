"""From logits to the next token, for rows that may each be drawn in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor

from penjing.base.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, Settings
from penjing.kernels.cpu import ops as cpu

GREEDY_BELOW = 1e-6  # smaller temperatures make infinite logits, and no chance can be had from those
SORTED = 256  # likeliest tokens of a row that are sorted; all are where those hold less than top_p
Penalty = Annotated[float, Ge(-2), Le(2)]


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """How the next token is drawn. temperature 0 takes the most likely one (greedy)."""

    temperature: NonNegativeFloat = 0.0  # logits are divided by it; below 1e-6 it is taken as 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # draw from the smallest set of tokens that holds this much probability
    top_k: NonNegativeInt = 0  # draw from the k most likely (and what equals the last of them); 0 = all
    min_p: Fraction = 0.0  # draw from tokens at least this share as likely as the likeliest
    # Logits of tokens in prompt or answer are divided by it if positive, else multiplied (arXiv:1909.05858).
    repetition_penalty: PositiveFloat = 1.0
    presence_penalty: Penalty = 0.0  # taken off the logits of tokens that the answer holds
    frequency_penalty: Penalty = 0.0  # the same, once for each time
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these ids

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Rows(NamedTuple):
    """How each of some rows is drawn and scored, one array for each setting."""

    temperature_R: NDArray[np.float32]
    top_k_R: NDArray[np.int64]
    top_p_R: NDArray[np.float32]
    min_p_R: NDArray[np.float32]
    score_temperature_R: NDArray[np.float32]

    @classmethod
    def empty(cls, rows: int) -> Self:
        one = np.zeros(rows, dtype=np.float32)
        return cls(one, np.zeros(rows, dtype=np.int64), one.copy(), one.copy(), one.copy())

    def put(self, row: int, sampling: Sampling, score_temperature: float) -> None:
        self.temperature_R[row], self.score_temperature_R[row] = sampling.temperature, score_temperature
        self.top_k_R[row], self.top_p_R[row], self.min_p_R[row] = sampling.top_k, sampling.top_p, sampling.min_p

    def take(self, row_N: NDArray[Any]) -> Self:
        return type(self)(*(array[row_N] for array in self))


class ChangedLogits(NamedTuple):
    """What is drawn from instead of a model's own logits, and which rows differ from those."""

    logits_RV: Tensor
    is_changed_R: NDArray[np.bool_]


class SampledTokens(NamedTuple):
    """One token of each row. logp: at the scores' temperature, under the whole softmax of the logits as they were."""

    id_R: Tensor
    logp_R: Tensor
    drawn_logp_R: Tensor


def draw(
    logits_RV: Tensor, uniform_R: NDArray[np.float32], rows: Rows, changed: ChangedLogits | None = None
) -> SampledTokens:
    """The token at `uniform_R` (0 to 1, float32 with 24 bits) of the cumulated probabilities, in the order of ids.

    changed: what is drawn from instead, with penalties, biases and masks in it. No row's result depends on the others,
    as long as torch has one thread: several part the sums of a single row of 32,768 values or more among themselves.
    """
    source_RV = logits_RV if changed is None else changed.logits_RV
    greedy_R = rows.temperature_R < GREEDY_BELOW
    if greedy_R.all():
        id_R = _likeliest(source_RV)
        return SampledTokens(
            id_R, scores(logits_RV, id_R, rows.score_temperature_R), torch.zeros(len(id_R), device=id_R.device)
        )
    shaped_RV = shape(source_RV, rows)
    top_R1, likeliest_R1 = shaped_RV.max(dim=-1, keepdim=True)
    # Left-out tokens add nothing, so the first sum above the target is never theirs; and u x total < total. Where parts
    # of the sum are taken side by side, as on CUDA, it may go down by a rounding error, and neither is certain: the
    # likeliest token stands in.
    sums_RV = (shaped_RV - top_R1).exp_().cumsum(dim=-1)
    total_R1 = sums_RV[:, -1:]
    uniform_R1 = torch.from_numpy(uniform_R).to(logits_RV.device)[:, None]
    id_R1 = torch.searchsorted(sums_RV, uniform_R1 * total_R1, right=True).clamp_(max=sums_RV.shape[1] - 1)
    id_R1 = torch.where(shaped_RV.gather(1, id_R1) > -torch.inf, id_R1, likeliest_R1)
    id_R, drawn_logp_R = id_R1[:, 0], (shaped_RV.gather(1, id_R1) - top_R1 - total_R1.log())[:, 0]
    if greedy_R.any():
        is_greedy_R = torch.from_numpy(greedy_R).to(id_R.device)
        id_R = torch.where(is_greedy_R, _likeliest(source_RV), id_R)
        drawn_logp_R = drawn_logp_R.masked_fill(is_greedy_R, 0.0)
    # Where all of the softmax was drawn from, at the temperature of the scores, that is the score.
    whole_R = (rows.top_p_R == 1) & (rows.top_k_R == 0) & (rows.min_p_R == 0) & ~greedy_R
    whole_R &= rows.temperature_R == rows.score_temperature_R
    if changed is not None:
        whole_R &= ~changed.is_changed_R
    if not whole_R.any():
        return SampledTokens(id_R, scores(logits_RV, id_R, rows.score_temperature_R), drawn_logp_R)
    if whole_R.all():
        return SampledTokens(id_R, drawn_logp_R, drawn_logp_R)
    is_whole_R = torch.from_numpy(whole_R).to(id_R.device)
    return SampledTokens(
        id_R, torch.where(is_whole_R, drawn_logp_R, scores(logits_RV, id_R, rows.score_temperature_R)), drawn_logp_R
    )


def scores(logits_RV: Tensor, id_R: Tensor, temperature_R: NDArray[np.float32]) -> Tensor:
    """logp_R of these tokens under the whole softmax at a temperature."""
    scaled_RV = _divided(logits_RV, temperature_R)
    return _log_probs(scaled_RV, id_R)[0]


def top_scores(logits_RV: Tensor, score_temperature_R: NDArray[np.float32], most: int) -> tuple[Tensor, Tensor]:
    """(logp_RK, id_RK): the `most` likeliest tokens of each row, the likeliest first."""
    scaled_RV = _divided(logits_RV, score_temperature_R)
    value_RK, id_RK = scaled_RV.topk(min(most, scaled_RV.shape[1]), dim=-1)
    return value_RK - _log_probs(scaled_RV, id_RK[:, 0])[1][:, None], id_RK


def _log_probs(logits_RV: Tensor, id_R: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(logits)[id] of each row, and the logarithm of the softmax's sum. On a CPU by the C kernel: it
    takes a fraction of the time of torch's logsumexp."""
    logits_RV = logits_RV.contiguous()
    if cpu.supports(logits_RV):
        logp_R, entropy_R, sum_R = logits_RV.new_empty(3, len(id_R), dtype=torch.float32)
        cpu.log_probs(logits_RV, id_R, logp_R, entropy_R, sum_R)
        return logp_R, sum_R
    sum_R = logits_RV.logsumexp(dim=-1)
    return logits_RV.gather(1, id_R[:, None])[:, 0] - sum_R, sum_R


def _divided(logits_RV: Tensor, temperature_R: NDArray[np.float32]) -> Tensor:
    if (temperature_R == 1).all():
        return logits_RV
    return logits_RV / torch.from_numpy(temperature_R).to(logits_RV.device)[:, None]


def shape(logits_RV: Tensor, rows: Rows) -> Tensor:
    """logits_RV of what is drawn from: divided by the temperature, and -inf where top_k, top_p and min_p leave out a
    token. With several of them, top_p is taken of what top_k left. Rows of greedy text are left as they are.

    All three leave out what is less likely than some token: a row's threshold is the highest of theirs.
    """
    logits_RV = _divided(logits_RV, np.where(rows.temperature_R < GREEDY_BELOW, np.float32(1), rows.temperature_R))
    is_cut_R = (rows.top_k_R > 0) | (rows.top_p_R < 1) | (rows.min_p_R > 0)
    if not is_cut_R.any():
        return logits_RV
    vocab_size = logits_RV.shape[1]
    most = min(vocab_size, max(SORTED, int(rows.top_k_R.max()) + 1))
    value_RK = _highest(logits_RV, most)
    least_R1 = _threshold(value_RK, logits_RV, rows)
    if most < vocab_size and (rows.top_p_R < 1).any():
        # Rows whose likeliest tokens hold too little are sorted as a whole, and no others: each has its own result.
        short_R = (least_R1[:, 0] <= value_RK[:, -1]).cpu().numpy() & (rows.top_p_R < 1)
        if short_R.any():
            short = torch.from_numpy(np.flatnonzero(short_R)).to(logits_RV.device)
            some_NV = logits_RV[short]
            least_R1[short] = _threshold(_highest(some_NV, vocab_size), some_NV, rows.take(np.flatnonzero(short_R)))
    return logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)


def _highest(logits_RV: Tensor, most: int) -> Tensor:
    """value_RK, the highest first. On a CPU numpy sorts, with wide registers: of 64 rows of 6,400 the first 256 take
    0.3 ms, and 3.3 by torch."""
    if logits_RV.device.type != "cpu":
        return logits_RV.topk(most, dim=-1).values
    last = logits_RV.shape[1] - most
    values = logits_RV.numpy()
    found = np.sort(np.partition(values, last, axis=-1)[:, last:] if last else values, axis=-1)
    return torch.from_numpy(np.ascontiguousarray(found[:, ::-1]))


def _likeliest(logits_RV: Tensor) -> Tensor:
    """id_R, the first of several. On a CPU by numpy: 12 times as fast."""
    if logits_RV.device.type != "cpu":
        return logits_RV.argmax(dim=-1)
    return torch.from_numpy(logits_RV.numpy().argmax(axis=-1))


def _threshold(value_RK: Tensor, logits_RV: Tensor, rows: Rows) -> Tensor:
    """least_R1 that stays in each row. value_RK: the row's highest logits, sorted."""
    device = logits_RV.device
    least_R1 = torch.full((len(value_RK), 1), -torch.inf, device=device)
    if rows.top_k_R.any():
        limited_R1 = torch.from_numpy((rows.top_k_R > 0) & (rows.top_k_R <= value_RK.shape[1])).to(device)[:, None]
        place_R1 = torch.from_numpy(np.clip(rows.top_k_R, 1, value_RK.shape[1]) - 1).to(device)[:, None]
        least_R1 = torch.where(limited_R1, value_RK.gather(1, place_R1), least_R1)
    if (rows.top_p_R < 1).any():
        top_p_R1 = torch.from_numpy(rows.top_p_R).to(device)[:, None]
        # of what top_k left, ties of its last token among it
        left_RV = logits_RV if not rows.top_k_R.any() else logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
        chance_RK = (value_RK - left_RV.logsumexp(dim=-1, keepdim=True)).exp()
        # A token stays if the more likely ones together hold less than top_p: the first always does.
        stays_RK = chance_RK.cumsum(dim=-1) - chance_RK < top_p_R1
        stays_RK[:, 0] = True
        last_R1 = stays_RK.sum(dim=-1, keepdim=True) - 1
        least_R1 = torch.where(top_p_R1 < 1, torch.maximum(least_R1, value_RK.gather(1, last_R1)), least_R1)
    if rows.min_p_R.any():
        share_R1 = torch.from_numpy(rows.min_p_R).to(device)[:, None].log()  # -inf for 0
        least_R1 = torch.maximum(least_R1, value_RK[:, :1] + share_R1)
    return least_R1
