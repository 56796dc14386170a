"""Log-likelihoods of the ends of many texts.

Equal beginnings are computed once: texts that share one are a row whose branches they are, as the answers to a prompt
are in training (loader/shared_prompt_batch.py). An input that several texts have in common, such as a question with
one-token choices, is computed once. The rows of a pass are similarly long. The softmax is in float64, of logits in
float32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
            largest_N = logits_NV.amax(dim=-1)
            log_sum_N = logits_NV.double().sub_(largest_N[:, None]).exp_().sum(dim=-1).log_()
            logp_M = (logit_M.double() - largest_N[row_M]) - log_sum_N[row_M]
            greedy_M = (logit_M == largest_N[row_M]).double()
            best = greedy_M.nonzero()[:, 0]
            greedy_M[best] /= (logits_NV[row_M[best]] == logit_M[best, None]).sum(dim=-1)
            parts.append(torch.stack([logp_M, greedy_M]).cpu())
        return torch.cat(parts, dim=1) if parts else torch.zeros(2, 0, dtype=torch.float64)


@dataclass(slots=True)
class _Tree:
    """Inputs with a common beginning of `prefix` tokens."""

    inputs: list[tuple[int, ...]]
    prefix: int
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.prefix + sum(len(ids) - self.prefix for ids in self.inputs)


@torch.no_grad()
def log_likelihoods(model: Transformer, endings: Sequence[Ending], batch_size: int = 64) -> list[EndingScore]:
    """The scores of endings, each given the ids before it. batch_size: a forward pass has about 128 x as many tokens,
    on a CPU 32 x. Raises NotFiniteError."""
    by_input: dict[tuple[int, ...], list[int]] = {}
    for index, ending in enumerate(endings):
        by_input.setdefault(tuple(ending.ids[:-1]), []).append(index)
    trees = sorted(_trees(sorted(by_input), model.config.hidden_size), key=lambda tree: -tree.size)
    scores: dict[int, EndingScore] = {}
    was_training = model.training
    model.eval()
    try:
        is_host = devices.of(model.embed.weight.device).is_host
        for rows in _passes(trees, batch_size * (HOST_TOKENS_PER_REQUEST if is_host else TOKENS_PER_REQUEST)):
            scores |= _score_rows(model, rows, by_input, endings)
    finally:
        model.train(was_training)
    return [scores[index] for index in range(len(endings))]


def _trees(inputs: Sequence[tuple[int, ...]], hidden_size: int) -> Iterator[_Tree]:
    """Neighbours of the sorted inputs, joined where that saves more in matrices than it costs in attention."""
    tree: _Tree | None = None
    for ids in inputs:
        if tree is not None:
            common = _common(tree.inputs[0], ids, tree.prefix)
            saved = common - (tree.prefix - common) * (len(tree.inputs) - 1)  # the others' common beginning is shorter
            # A layer has about 24 D^2 operations per token and 4 D per pair of tokens, which take about 3 x as long.
            if 2 * hidden_size * saved > tree.size * len(ids):
                tree.inputs.append(ids)
                tree.prefix, tree.size = common, tree.size + len(ids) - saved
                continue
            yield tree
        tree = _Tree([ids], len(ids))
    if tree is not None:
        yield tree


def _common(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """How many ids at the beginning are equal, up to `limit`."""
    limit = min(limit, len(second))
    return next((place for place in range(limit) if first[place] != second[place]), limit)


def _passes(trees: Sequence[_Tree], max_tokens: int) -> Iterator[Sequence[_Tree]]:
    """The trees of each forward pass, a row each."""
    first = 0
    while first < len(trees):
        rows = max(1, max_tokens // _row_tokens(trees[first]))
        yield trees[first : first + rows]
        first += rows


def _row_tokens(tree: _Tree) -> int:
    return -(-tree.size // ROW_MULTIPLE) * ROW_MULTIPLE


def _score_rows(
    model: Transformer,
    trees: Sequence[_Tree],
    by_input: dict[tuple[int, ...], list[int]],
    endings: Sequence[Ending],
) -> dict[int, EndingScore]:
    """The scores by index of the endings whose inputs are in these trees, of which the first is the largest."""
    row_tokens = _row_tokens(trees[0])
    ids_BT = np.zeros((len(trees), row_tokens), dtype=np.int64)
    branch_BT, position_BT = np.full_like(ids_BT, -1), np.zeros_like(ids_BT)  # -1: padding
    places: dict[int, list[int]] = {}  # flat indices of the positions that predict an ending's tokens
    for row, tree in enumerate(trees):
        at = prefix = tree.prefix
        ids_BT[row, :prefix], branch_BT[row, :prefix] = tree.inputs[0][:prefix], 0
        position_BT[row, :prefix] = range(prefix)
        for branch, ids in enumerate(tree.inputs, start=1):
            end = at + len(ids) - prefix
            ids_BT[row, at:end], branch_BT[row, at:end] = ids[prefix:], branch
            position_BT[row, at:end] = range(prefix, len(ids))
            origin = row * row_tokens
            for index in by_input[ids]:
                predicting = range(endings[index].first - 1, len(ids))
                places[index] = [origin + place + (at - prefix) * (place >= prefix) for place in predicting]
            at = end
    lengths = [len(found) for found in places.values()]
    flat = np.fromiter(chain.from_iterable(places.values()), dtype=np.int64)
    ends = (endings[index].ids[endings[index].first :] for index in places)
    targets = np.fromiter(chain.from_iterable(ends), dtype=np.int64)
    scored_N, position_M = np.unique(flat, return_inverse=True)
    order = np.argsort(position_M, kind="stable")
    inputs = [
        torch.from_numpy(np.ascontiguousarray(array)).to(model.embed.weight.device)
        for array in (ids_BT, branch_BT, position_BT, scored_N, position_M[order], targets[order])
    ]
    found_2M = model(
        inputs[0],
        branch_BT=inputs[1],
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
    for index, length in zip(places, lengths, strict=True):
        logps, greedy = by_token_2M[:, first : first + length]
        # Added exactly: equal values tie in any order.
        scores[index] = EndingScore(math.fsum(logps.tolist()), length, float(greedy.prod()))
        first += length
    return scores
