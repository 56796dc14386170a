"""From logits to the next token; each row has its own sampling settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from torch import Tensor

from penjing import devices
from penjing.base.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, Settings
from penjing.infer.forward import on_device
from penjing.kernels.select import find_fused

GREEDY_BELOW = 1e-6  # smaller temperatures would make infinite logits
NUM_SORTED = 256  # most likely tokens of a row that are sorted; all if these hold less than top_p
LARGEST_TEMPERATURE = 1e30  # every token is equally likely long before; larger ones are Inf in float32
LARGEST_TOP_K = 1 << 31  # more than any vocabulary
Penalty = Annotated[float, Ge(-2), Le(2)]


@dataclass(frozen=True, kw_only=True)
class Sampling(Settings):
    """How the next token is sampled. temperature 0 takes the most likely one (greedy)."""

    temperature: NonNegativeFloat = 0.0  # logits are divided by it; below 1e-6 it counts as 0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # sample from the smallest set of tokens with this total probability
    top_k: NonNegativeInt = 0  # sample from the k most likely tokens (and ties of the last); 0 = all
    min_p: Fraction = 0.0  # sample from tokens at least this fraction as likely as the most likely
    # Logits of tokens in prompt or answer are divided by it if positive, else multiplied (arXiv:1909.05858).
    repetition_penalty: PositiveFloat = 1.0
    presence_penalty: Penalty = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: Penalty = 0.0  # the same, once per occurrence
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these ids

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class Rows(NamedTuple):
    """The sampling settings of rows, one array for each setting."""

    temperature_R: NDArray[np.float32]
    top_k_R: NDArray[np.int64]
    top_p_R: NDArray[np.float32]
    min_p_R: NDArray[np.float32]
    score_temperature_R: NDArray[np.float32]

    @classmethod
    def empty(cls, rows: int) -> Self:
        zeros_R = np.zeros(rows, dtype=np.float32)
        return cls(zeros_R, np.zeros(rows, dtype=np.int64), zeros_R.copy(), zeros_R.copy(), zeros_R.copy())

    def put(self, row: int, sampling: Sampling, score_temperature: float) -> None:
        self.temperature_R[row] = min(sampling.temperature, LARGEST_TEMPERATURE)
        self.score_temperature_R[row] = min(score_temperature, LARGEST_TEMPERATURE)
        self.top_k_R[row] = min(sampling.top_k, LARGEST_TOP_K)
        self.top_p_R[row], self.min_p_R[row] = sampling.top_p, sampling.min_p

    def take(self, row_N: NDArray[Any]) -> Self:
        return type(self)(*(array[row_N] for array in self))


class ProcessedLogits(NamedTuple):
    """Logits after penalties, biases and masks, and which rows they changed."""

    logits_RV: Tensor
    is_processed_R: NDArray[np.bool_]


class SampledTokens(NamedTuple):
    """One token of each row. logp: under the full softmax of the unprocessed logits at `score_temperature`."""

    id_R: Tensor
    logp_R: Tensor
    sampling_logp_R: Tensor


def sample_tokens(
    logits_RV: Tensor, uniform_R: NDArray[np.float32], rows: Rows, processed: ProcessedLogits | None = None
) -> SampledTokens:
    """Inverse transform sampling: the token at `uniform_R` (0 to 1, 24 bits) of the cumulative distribution over ids.

    processed: logits to sample from instead. No row's result depends on the others, as long as torch has one thread:
    several threads split the sums of a single row of 32,768 values or more.
    """
    source_RV = logits_RV if processed is None else processed.logits_RV
    greedy_R = rows.temperature_R < GREEDY_BELOW
    if greedy_R.all():
        id_R = _argmax(source_RV)
        return SampledTokens(
            id_R, scores(logits_RV, id_R, rows.score_temperature_R), torch.zeros(len(id_R), device=id_R.device)
        )
    warped_RV = warp_logits(source_RV, rows)
    max_R1, argmax_R1 = warped_RV.max(dim=-1, keepdim=True)
    # Filtered tokens add nothing, so the first sum above the target is never theirs; and u x total < total. A parallel
    # cumsum, as on GPUs, may decrease by a rounding error, so that neither is certain: then take the most likely token.
    cumsum_RV = (warped_RV - max_R1).exp_().cumsum(dim=-1)
    total_R1 = cumsum_RV[:, -1:]
    uniform_R1 = on_device(uniform_R, logits_RV.device)[:, None]
    id_R1 = torch.searchsorted(cumsum_RV, uniform_R1 * total_R1, right=True).clamp_(max=cumsum_RV.shape[1] - 1)
    id_R1 = torch.where(warped_RV.gather(1, id_R1) > -torch.inf, id_R1, argmax_R1)
    id_R, sampling_logp_R = id_R1[:, 0], (warped_RV.gather(1, id_R1) - max_R1 - total_R1.log())[:, 0]
    if greedy_R.any():
        is_greedy_R = on_device(greedy_R, id_R.device)
        id_R = torch.where(is_greedy_R, _argmax(source_RV), id_R)
        sampling_logp_R = sampling_logp_R.masked_fill(is_greedy_R, 0.0)
    # If the row was sampled from the full softmax at score_temperature, both log-probabilities are the same.
    is_unfiltered_R = (rows.top_p_R == 1) & (rows.top_k_R == 0) & (rows.min_p_R == 0) & ~greedy_R
    is_unfiltered_R &= rows.temperature_R == rows.score_temperature_R
    if processed is not None:
        is_unfiltered_R &= ~processed.is_processed_R
    if not is_unfiltered_R.any():
        return SampledTokens(id_R, scores(logits_RV, id_R, rows.score_temperature_R), sampling_logp_R)
    if is_unfiltered_R.all():
        return SampledTokens(id_R, sampling_logp_R, sampling_logp_R)
    mask_R = on_device(is_unfiltered_R, id_R.device)
    return SampledTokens(
        id_R, torch.where(mask_R, sampling_logp_R, scores(logits_RV, id_R, rows.score_temperature_R)), sampling_logp_R
    )


def scores(logits_RV: Tensor, id_R: Tensor, temperature_R: NDArray[np.float32]) -> Tensor:
    """logp_R of these tokens under the full softmax at a temperature."""
    return _log_probs(_scale(logits_RV, temperature_R), id_R)[0]


def top_scores(logits_RV: Tensor, score_temperature_R: NDArray[np.float32], k: int) -> tuple[Tensor, Tensor]:
    """(logp_RK, id_RK): the `k` most likely tokens of each row, the most likely first."""
    scaled_RV = _scale(logits_RV, score_temperature_R)
    value_RK, id_RK = scaled_RV.topk(min(k, scaled_RV.shape[1]), dim=-1)
    return value_RK - _log_probs(scaled_RV, id_RK[:, 0])[1][:, None], id_RK


def _log_probs(logits_RV: Tensor, id_R: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax(logits)[id] and the logsumexp of each row. On a CPU by the C kernel, which takes a fraction of the
    time of torch's logsumexp."""
    logits_RV = logits_RV.contiguous()
    if (kernel := find_fused("log_probs", logits_RV)) is not None:
        logp_R, entropy_R, logsumexp_R = logits_RV.new_empty(3, len(id_R), dtype=torch.float32)
        kernel(logits_RV, id_R, logp_R, entropy_R, logsumexp_R)
        return logp_R, logsumexp_R
    logsumexp_R = logits_RV.logsumexp(dim=-1)
    return logits_RV.gather(1, id_R[:, None])[:, 0] - logsumexp_R, logsumexp_R


def _scale(logits_RV: Tensor, temperature_R: NDArray[np.float32]) -> Tensor:
    if (temperature_R == 1).all():
        return logits_RV
    return logits_RV / on_device(temperature_R, logits_RV.device)[:, None]


def warp_logits(logits_RV: Tensor, rows: Rows) -> Tensor:
    """The logits to sample from: divided by the temperature, and -inf where top_k, top_p or min_p filter a token.

    top_p applies to the tokens that top_k kept. Greedy rows are unchanged. Each of the three filters has a threshold;
    a row's threshold is the highest of them.
    """
    logits_RV = _scale(logits_RV, np.where(rows.temperature_R < GREEDY_BELOW, np.float32(1), rows.temperature_R))
    is_cut_R = (rows.top_k_R > 0) | (rows.top_p_R < 1) | (rows.min_p_R > 0)
    if not is_cut_R.any():
        return logits_RV
    vocab_size = logits_RV.shape[1]
    k = min(vocab_size, max(NUM_SORTED, int(rows.top_k_R.max()) + 1))
    value_RK = _top_values(logits_RV, k)
    threshold_R1 = _threshold(value_RK, logits_RV, rows)
    if k < vocab_size and (rows.top_p_R < 1).any():
        # Only rows whose sorted tokens hold too little probability are sorted in full.
        unsorted_R = (threshold_R1[:, 0] <= value_RK[:, -1]).cpu().numpy() & (rows.top_p_R < 1)
        if unsorted_R.any():
            row_N = on_device(np.flatnonzero(unsorted_R), logits_RV.device)
            subset_NV = logits_RV[row_N]
            threshold_R1[row_N] = _threshold(
                _top_values(subset_NV, vocab_size), subset_NV, rows.take(np.flatnonzero(unsorted_R))
            )
    return logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)


def _top_values(logits_RV: Tensor, k: int) -> Tensor:
    """value_RK, the highest first. On a CPU by numpy, whose sort is vectorised: the top 256 of 64 rows of 6,400 take
    0.3 ms, with torch 3.3 ms."""
    if not devices.of(logits_RV.device).is_host:
        return logits_RV.topk(k, dim=-1).values
    last = logits_RV.shape[1] - k
    values = logits_RV.numpy()
    top_values = np.sort(np.partition(values, last, axis=-1)[:, last:] if last else values, axis=-1)
    return torch.from_numpy(np.ascontiguousarray(top_values[:, ::-1]))


def _argmax(logits_RV: Tensor) -> Tensor:
    """id_R; of ties the first. On a CPU by numpy: 12 times as fast."""
    if not devices.of(logits_RV.device).is_host:
        return logits_RV.argmax(dim=-1)
    return torch.from_numpy(logits_RV.numpy().argmax(axis=-1))


def _threshold(value_RK: Tensor, logits_RV: Tensor, rows: Rows) -> Tensor:
    """The lowest logit that each row keeps. value_RK: the row's highest logits, sorted."""
    device = logits_RV.device
    threshold_R1 = torch.full((len(value_RK), 1), -torch.inf, device=device)
    if rows.top_k_R.any():
        limited_R1 = on_device((rows.top_k_R > 0) & (rows.top_k_R <= value_RK.shape[1]), device)[:, None]
        index_R1 = on_device(np.clip(rows.top_k_R, 1, value_RK.shape[1]) - 1, device)[:, None]
        threshold_R1 = torch.where(limited_R1, value_RK.gather(1, index_R1), threshold_R1)
    if (rows.top_p_R < 1).any():
        top_p_R1 = on_device(rows.top_p_R, device)[:, None]
        # the tokens that top_k kept, with ties of the last
        topk_RV = logits_RV if not rows.top_k_R.any() else logits_RV.masked_fill(logits_RV < threshold_R1, -torch.inf)
        prob_RK = (value_RK - topk_RV.logsumexp(dim=-1, keepdim=True)).exp()
        # Keep a token if the more likely ones together hold less than top_p. The first is always kept.
        keep_RK = prob_RK.cumsum(dim=-1) - prob_RK < top_p_R1
        keep_RK[:, 0] = True
        last_R1 = keep_RK.sum(dim=-1, keepdim=True) - 1
        threshold_R1 = torch.where(top_p_R1 < 1, torch.maximum(threshold_R1, value_RK.gather(1, last_R1)), threshold_R1)
    if rows.min_p_R.any():
        log_min_p_R1 = on_device(rows.min_p_R, device)[:, None].log()  # -inf for 0
        threshold_R1 = torch.maximum(threshold_R1, value_RK[:, :1] + log_min_p_R1)
    return threshold_R1
