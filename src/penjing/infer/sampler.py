"""Samples the next token of each slot with its request's settings, and returns log-probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing import devices
from penjing.infer.forward import Ints, on_device
from penjing.infer.penalties import Penalties
from penjing.infer.requests import Request, Token
from penjing.infer.sample import Rows, sample_tokens, scores, top_scores
from penjing.kernels.cpu import library

MAX_FLOAT64 = 1 << 22  # logits of a prompt that are converted at a time
TopLogprobs = tuple[tuple[int, float], ...]
Masks = Mapping[int, NDArray[np.bool_]]


@contextmanager
def _single_threaded(device: torch.device) -> Iterator[None]:
    """Run torch's CPU operations on one core. A step's tensors are small, so several threads mostly wait for each
    other, and keep cores busy between steps. On two busy cores 16 answers of a 26M model were 2.5 times as fast."""
    num_threads = torch.get_num_threads()
    if devices.of(device).is_host:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class SamplerOutput(NamedTuple):
    """One token of each row, on the host."""

    id_R: Ints
    logp_R: NDArray[np.float32]
    sampling_logp_R: NDArray[np.float32]
    top_logprobs: list[TopLogprobs]


class Sampler:
    """The sampling settings and random numbers of each slot."""

    def __init__(self, num_slots: int, max_tokens: int, vocab_size: int, device: torch.device) -> None:
        self._rows = Rows.empty(num_slots)
        self._uniform_ST = np.zeros((num_slots, max_tokens), dtype=np.float32)
        self._num_top_S = np.zeros(num_slots, dtype=np.int64)
        self._penalties = Penalties(num_slots, vocab_size, device)
        if devices.of(device).is_host:
            library.kernels()  # build them now, not with the first token

    def put(self, slot: int, request: Request, seed: int, limit: int, generated_ids: Sequence[int]) -> None:
        """Start an answer of up to `limit` tokens in this slot, or continue it after `generated_ids`."""
        if not request.sampling.is_greedy:
            generator = np.random.Generator(np.random.PCG64(seed))
            self._uniform_ST[slot, :limit] = generator.random(limit, dtype=np.float32)
        self._rows.put(slot, request.sampling, request.score_temperature)
        self._num_top_S[slot] = request.top_logprobs
        self._penalties.put(slot, request.sampling, request.prompt, generated_ids)

    def sample(self, slot_R: Ints, index_R: Ints, logits_RV: Tensor, masks: Masks) -> SamplerOutput:
        """Sample token number `index_R` of each slot's answer. masks: by row, the allowed ids."""
        rows = self._rows.take(slot_R)
        with _single_threaded(logits_RV.device):
            processed = self._penalties.apply(logits_RV, slot_R, masks)
            sampled = sample_tokens(logits_RV, self._uniform_ST[slot_R, index_R], rows, processed)
            top_logprobs = _top_logprobs(logits_RV, rows.score_temperature_R, self._num_top_S[slot_R])
            # One transfer means one wait for the device. Ids below 2^24 are exact in float32.
            host_3R = torch.stack([sampled.id_R.float(), sampled.logp_R, sampled.sampling_logp_R]).cpu().numpy()
            self._penalties.count(slot_R, sampled.id_R)  # last: after an error the rows are sampled again
        return SamplerOutput(host_3R[0].astype(np.int64), host_3R[1], host_3R[2], top_logprobs)


def score(logits_NV: Tensor, id_N: NDArray[np.int32], request: Request) -> list[Token]:
    """A prompt's tokens with their log-probabilities. logits_NV: those that predict each token. The softmax is in
    float64, so that texts are compared by what the model computed, not by its rounding."""
    if not devices.of(logits_NV.device).supports_float64:
        logits_NV = logits_NV.cpu()
    temperature_N = np.full(len(id_N), request.score_temperature, np.float32)
    num_top_N, tokens, rows = np.full(len(id_N), request.top_logprobs), list[Token](), MAX_FLOAT64 // logits_NV.shape[1]
    with _single_threaded(logits_NV.device):
        for first in range(0, len(id_N), rows + 1):
            part = slice(first, first + rows + 1)
            exact_NV = logits_NV[part].double()
            logp_N = scores(exact_NV, on_device(id_N[part].astype(np.int64), exact_NV.device), temperature_N[part])
            tops = _top_logprobs(exact_NV, temperature_N[part], num_top_N[part])
            tokens += map(Token, id_N[part].tolist(), logp_N.tolist(), repeat(0.0), tops)
    return tokens


def _top_logprobs(logits_RV: Tensor, temperature_R: NDArray[np.float32], num_top_R: Ints) -> list[TopLogprobs]:
    """Each row's most likely ids with their log-probabilities."""
    k = int(num_top_R.max(initial=0))
    if not k:
        return [()] * len(num_top_R)
    logp_RK, id_RK = top_scores(logits_RV, temperature_R, k)
    logp, ids = logp_RK.tolist(), id_RK.tolist()
    return [
        tuple(zip(ids[row][:count], logp[row][:count], strict=True)) for row, count in enumerate(num_top_R.tolist())
    ]
