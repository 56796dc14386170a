"""Draws the next tokens of slots, each as its request wants it, and scores them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.infer.forward import Ints
from penjing.infer.penalties import Penalties
from penjing.infer.requests import Request, Token
from penjing.infer.sample import Rows, draw, scores, top_scores
from penjing.kernels.cpu import library

Top = tuple[tuple[int, float], ...]


@contextmanager
def _on_one_thread(device: torch.device) -> Iterator[None]:
    """torch's operations on one core: several threads wait for one another longer than a step's small tensors take (on
    two busy cores 16 answers of a 26M model came 2.5 times as fast), and between the steps keep their cores busy."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Drawn(NamedTuple):
    """One token of each row, on the host."""

    id_R: Ints
    logp_R: NDArray[np.float32]
    drawn_logp_R: NDArray[np.float32]
    tops: list[Top]


class Sampler:
    """How each slot's answer is drawn."""

    def __init__(self, num_slots: int, max_tokens: int, vocab_size: int, device: torch.device) -> None:
        self._rows = Rows.empty(num_slots)
        self._uniform_ST = np.zeros((num_slots, max_tokens), dtype=np.float32)
        self._num_top_S = np.zeros(num_slots, dtype=np.int64)
        self._penalties = Penalties(num_slots, vocab_size, device)
        if device.type == "cpu":
            library.kernels()  # built now where they are missing, and not with the first token

    def put(self, slot: int, request: Request, seed: int, limit: int, said: Sequence[int]) -> None:
        """An answer of up to `limit` tokens begins in this slot, or goes on after those it `said`."""
        if not request.sampling.is_greedy:
            generator = np.random.Generator(np.random.PCG64(seed))
            self._uniform_ST[slot, :limit] = generator.random(limit, dtype=np.float32)
        self._rows.put(slot, request.sampling, request.score_temperature)
        self._num_top_S[slot] = request.top_logprobs
        self._penalties.put(slot, request.sampling, request.prompt, said)

    def draw(self, slot_R: Ints, at_R: Ints, logits_RV: Tensor, masks: Mapping[int, NDArray[np.bool_]]) -> Drawn:
        """The tokens at the places `at_R` of the answers in these slots. masks: by row, which ids may come."""
        rows = self._rows.take(slot_R)
        with _on_one_thread(logits_RV.device):
            changed = self._penalties.changed(logits_RV, slot_R, masks)
            drawn = draw(logits_RV, self._uniform_ST[slot_R, at_R], rows, changed)
            self._penalties.said(slot_R, drawn.id_R)
            tops = _tops(logits_RV, rows.score_temperature_R, self._num_top_S[slot_R])
            # One transfer, and so one wait for the device: ids below 2^24 are whole in float32.
            told_3R = torch.stack([drawn.id_R.float(), drawn.logp_R, drawn.drawn_logp_R]).cpu().numpy()
        return Drawn(told_3R[0].astype(np.int64), told_3R[1], told_3R[2], tops)


def score(logits_NV: Tensor, id_N: NDArray[np.int32], request: Request) -> list[Token]:
    """A prompt's tokens with their log-probabilities, given the logits before each."""
    temperature_N = np.full(len(id_N), request.score_temperature, np.float32)
    with _on_one_thread(logits_NV.device):
        logp_N = scores(logits_NV, torch.from_numpy(id_N.astype(np.int64)).to(logits_NV.device), temperature_N)
        tops = _tops(logits_NV, temperature_N, np.full(len(id_N), request.top_logprobs))
    return [Token(index, logp, 0.0, top) for index, logp, top in zip(id_N.tolist(), logp_N.tolist(), tops, strict=True)]


def _tops(logits_RV: Tensor, temperature_R: NDArray[np.float32], num_top_R: Ints) -> list[Top]:
    """Each row's likeliest ids with their log-probabilities."""
    most = int(num_top_R.max(initial=0))
    if not most:
        return [()] * len(num_top_R)
    logp_RK, id_RK = top_scores(logits_RV, temperature_R, most)
    logp, ids = logp_RK.tolist(), id_RK.tolist()
    return [
        tuple(zip(ids[row][:count], logp[row][:count], strict=True)) for row, count in enumerate(num_top_R.tolist())
    ]
