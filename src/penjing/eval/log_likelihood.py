"""Log-likelihoods of the ends of many texts.

Equal beginnings are computed once: the texts of a row are the paths of a tree. An input that several texts have in
common, such as a question with one-token choices, is computed once. The rows of a pass are similarly long. The softmax
is in float64, of logits in float32.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penjing import devices
from penjing.infer.requests import NotFiniteError
from penjing.kernels import ops
from penjing.model.transformer import Transformer

TOKENS_PER_REQUEST = 128  # of a forward pass
HOST_TOKENS_PER_REQUEST = 32  # on a CPU: activations that stay in its cache
SHORT_ROW = 64  # tokens of a row up to which texts are joined for less padding
ROW_MULTIPLE, HEAD_MULTIPLE = 16, 128  # few shapes: on a CPU each new one of a matmul costs milliseconds
MAX_LOGITS = 1 << 20  # of one block of the head


class Ending(NamedTuple):
    """The ids of a text, and the index of the first one that is scored (at least 1)."""

    ids: Sequence[int]
    first: int


class EndingScore(NamedTuple):
    """Of an ending: log p in nats, its tokens, and whether each is the most likely one: 1, 0, or 1/k with k equal."""

    logp: float
    num_tokens: int
    greedy: float


class _TokenScores(NamedTuple):
    """`Score` of pairs of a position and a target: [2, M] in float64, log p and greedy. position_M ascends."""

    position_M: Tensor
    target_M: Tensor

    def __call__(self, hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        rows = max(1, MAX_LOGITS // len(weight_VD))
        parts = []
        for first in range(0, len(hidden_ND), rows):
            block_ND = hidden_ND[first : first + rows]
            padding = min(rows, -(-len(hidden_ND) // HEAD_MULTIPLE) * HEAD_MULTIPLE) - len(block_ND)
            padded_ND = torch.nn.functional.pad(block_ND, (0, 0, 0, padding))
            logits_NV = ops.logits(padded_ND, weight_VD, dtype)[: len(block_ND)].float()
            if not devices.of(logits_NV.device).supports_float64:
                logits_NV = logits_NV.cpu()
            ends = torch.tensor([first, first + rows], device=self.position_M.device)
            start, end = torch.searchsorted(self.position_M, ends).tolist()
            row_M = (self.position_M[start:end] - first).to(logits_NV.device)
            logit_M = logits_NV[row_M, self.target_M[start:end].to(logits_NV.device)]
            largest_M, equal_M, log_sum_M = (x_N[row_M] for x_N in ops.log_sum_exp(logits_NV))
            logp_M = (logit_M.double() - largest_M) - log_sum_M
            greedy_M = (logit_M == largest_M).double() / equal_M
            parts.append(torch.stack([logp_M, greedy_M]).cpu())
        return torch.cat(parts, dim=1) if parts else torch.zeros(2, 0, dtype=torch.float64)


@dataclass(slots=True)
class _Row:
    """Sorted inputs, of which each adds to the row what it does not share with the one before: the tokens of a prefix
    tree in depth-first order. shared: that many tokens."""

    inputs: list[tuple[int, ...]]
    shared: list[int]
    size: int


@torch.no_grad()
def log_likelihoods(model: Transformer, endings: Sequence[Ending], batch_size: int = 64) -> list[EndingScore]:
    """The scores of endings, each given the ids before it. batch_size: a forward pass has about 128 x as many tokens,
    on a CPU 32 x. Raises NotFiniteError."""
    by_input: dict[tuple[int, ...], list[int]] = {}
    for index, ending in enumerate(endings):
        by_input.setdefault(tuple(ending.ids[:-1]), []).append(index)
    all_rows = sorted(_rows(sorted(by_input), model.config.hidden_size), key=lambda row: -row.size)
    scores: dict[int, EndingScore] = {}
    was_training = model.training
    model.eval()
    try:
        is_host = devices.of(model.embed.weight.device).is_host
        for rows in _passes(all_rows, batch_size * (HOST_TOKENS_PER_REQUEST if is_host else TOKENS_PER_REQUEST)):
            scores |= _score_rows(model, rows, by_input, endings)
    finally:
        model.train(was_training)
    return [scores[index] for index in range(len(endings))]


def _rows(inputs: Iterable[tuple[int, ...]], hidden_size: int) -> Iterator[_Row]:
    """Neighbours of the sorted inputs, joined in short rows, and where that saves more in matrices than it costs in
    attention."""
    row: _Row | None = None
    for ids in inputs:
        if row is not None:
            shared = num_common(row.inputs[-1], ids)
            size = row.size + len(ids) - shared
            # A layer has about 24 D^2 operations per token and 4 D per pair of tokens, which take about 3 x as long.
            if size <= SHORT_ROW or 2 * hidden_size * shared > row.size * len(ids):
                row.inputs.append(ids)
                row.shared.append(shared)
                row.size = size
                continue
            yield row
        row = _Row([ids], [0], len(ids))
    if row is not None:
        yield row


def num_common(*sequences: Sequence[int]) -> int:
    """How many ids all sequences have in common at their beginning."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((place for place, ids in columns if ids.count(ids[0]) < len(ids)), min(map(len, sequences)))


def _passes(rows: Sequence[_Row], max_tokens: int) -> Iterator[Sequence[_Row]]:
    """The rows of each forward pass."""
    first = 0
    while first < len(rows):
        end = first + max(1, max_tokens // _padded(rows[first]))
        yield rows[first:end]
        first = end


def _padded(row: _Row) -> int:
    return -(-row.size // ROW_MULTIPLE) * ROW_MULTIPLE


def _score_rows(
    model: Transformer, rows: Sequence[_Row], by_input: dict[tuple[int, ...], list[int]], endings: Sequence[Ending]
) -> dict[int, EndingScore]:
    """The scores by index of the endings whose inputs are in these rows, of which the first is the longest."""
    width = _padded(rows[0])
    ids_BT = np.zeros((len(rows), width), dtype=np.int64)
    position_BT = np.zeros_like(ids_BT)
    subtree_end_BT = np.tile(np.arange(1, width + 1), (len(rows), 1))  # padding is seen by itself alone
    places: dict[int, list[int]] = {}  # flat indices of the positions that predict an ending's tokens
    for number, row in enumerate(rows):
        at, path = 0, list[int]()  # of the last input
        for ids, shared in zip(row.inputs, row.shared, strict=True):
            subtree_end_BT[number, path[shared:]] = at
            end = at + len(ids) - shared
            path[shared:] = range(at, end)
            ids_BT[number, at:end], position_BT[number, at:end] = ids[shared:], range(shared, len(ids))
            for index in by_input[ids]:
                places[index] = [number * width + place for place in path[endings[index].first - 1 :]]
            at = end
        subtree_end_BT[number, path] = at
    flat = np.fromiter(chain.from_iterable(places.values()), dtype=np.int64)
    ends = (endings[index].ids[endings[index].first :] for index in places)
    targets = np.fromiter(chain.from_iterable(ends), dtype=np.int64)
    scored_N, position_M = np.unique(flat, return_inverse=True)
    order = np.argsort(position_M, kind="stable")
    inputs = [
        torch.from_numpy(np.ascontiguousarray(array)).to(model.embed.weight.device)
        for array in (ids_BT, subtree_end_BT, position_BT, scored_N, position_M[order], targets[order])
    ]
    found_2M = model(
        inputs[0],
        subtree_end_BT=inputs[1],
        position_BT=inputs[2],
        scored_N=inputs[3],
        score=_TokenScores(inputs[4], inputs[5]),
    )
    assert isinstance(found_2M, Tensor)
    if not found_2M.isfinite().all():
        raise NotFiniteError
    by_token_2M = np.empty(found_2M.shape)
    by_token_2M[:, order] = found_2M.numpy()
    scores, first = {}, 0
    for index, found in places.items():
        logps, greedy = by_token_2M[:, first : first + len(found)]
        # Added exactly: equal values tie in any order.
        scores[index] = EndingScore(math.fsum(logps.tolist()), len(found), float(greedy.prod()))
        first += len(found)
    return scores
