"""Log-likelihoods of the ends of many texts, in packed rows.

Equal beginnings are computed once: texts that share one are a document whose branches they are, as the answers to a
prompt are in training (loader/shared_prompt_batch.py). An input that several texts have in common, such as a question
with one-token choices, is computed once. The softmax is in float64, of logits in float32.
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
from penjing.loader.shared_prompt_batch import best_fit_rows
from penjing.model.transformer import Transformer

TOKENS_PER_REQUEST = 128  # of a forward pass
ROW_MULTIPLE, SHORTEST_ROW, LONGEST_ROW = 64, 256, 2048  # few shapes; space for several texts of a shared beginning
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
            padding = min(rows, -(-len(hidden_ND) // ROW_MULTIPLE) * ROW_MULTIPLE) - len(block_ND)
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
    """The scores of endings, each given the ids before it. batch_size: a forward pass has about 128 x as many tokens.
    Raises NotFiniteError."""
    by_input: dict[tuple[int, ...], list[int]] = {}
    for index, ending in enumerate(endings):
        by_input.setdefault(tuple(ending.ids[:-1]), []).append(index)
    longest = max(map(len, by_input), default=1)
    trees = sorted(_trees(sorted(by_input), max(longest, min(4 * longest, LONGEST_ROW))), key=lambda tree: -tree.size)
    row_tokens = max(SHORTEST_ROW, -(-max((tree.size for tree in trees), default=1) // ROW_MULTIPLE) * ROW_MULTIPLE)
    scores: dict[int, EndingScore] = {}
    rows_per_pass = max(1, batch_size * TOKENS_PER_REQUEST // row_tokens)
    was_training = model.training
    model.eval()
    try:
        for rows in _passes(trees, row_tokens, rows_per_pass):
            scores |= _score_rows(model, rows, row_tokens, by_input, endings)
    finally:
        model.train(was_training)
    return [scores[index] for index in range(len(endings))]


def _trees(inputs: Sequence[tuple[int, ...]], row_tokens: int) -> Iterator[_Tree]:
    """Neighbours of the sorted inputs, joined while that saves tokens and a row has space."""
    tree: _Tree | None = None
    for ids in inputs:
        if tree is not None:
            common = _common(tree.inputs[0], ids, tree.prefix)
            longer = (tree.prefix - common) * (len(tree.inputs) - 1)  # its inputs have a shorter common beginning
            size = tree.size + longer + len(ids) - common
            if size < tree.size + len(ids) and size <= row_tokens:
                tree.inputs.append(ids)
                tree.prefix, tree.size = common, size
                continue
            yield tree
        tree = _Tree([ids], len(ids))
    if tree is not None:
        yield tree


def _common(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """How many ids at the beginning are equal, up to `limit`."""
    limit = min(limit, len(second))
    return next((place for place in range(limit) if first[place] != second[place]), limit)


def _passes(trees: Sequence[_Tree], row_tokens: int, rows_per_pass: int) -> Iterator[list[list[_Tree]]]:
    """The rows of each forward pass."""
    waiting: list[_Tree] = []
    free = rows_per_pass * row_tokens
    for tree in trees:
        if tree.size > free:
            packed = _packed(waiting, row_tokens)
            yield packed[:rows_per_pass]
            waiting = [tree for row in packed[rows_per_pass:] for tree in row]
            free = rows_per_pass * row_tokens - sum(tree.size for tree in waiting)
        waiting.append(tree)
        free -= tree.size
    packed = _packed(waiting, row_tokens)
    for first in range(0, len(packed), rows_per_pass):
        yield packed[first : first + rows_per_pass]


def _packed(trees: Sequence[_Tree], row_tokens: int) -> list[list[_Tree]]:
    return [[trees[index] for index in row] for row in best_fit_rows([tree.size for tree in trees], row_tokens)]


def _score_rows(
    model: Transformer,
    rows: Sequence[Sequence[_Tree]],
    row_tokens: int,
    by_input: dict[tuple[int, ...], list[int]],
    endings: Sequence[Ending],
) -> dict[int, EndingScore]:
    """The scores by index of the endings whose inputs are in these rows."""
    ids_BT = np.zeros((len(rows), row_tokens), dtype=np.int64)
    document_BT = np.full_like(ids_BT, -1)  # padding
    branch_BT, position_BT = np.zeros_like(ids_BT), np.zeros_like(ids_BT)
    places: dict[int, list[int]] = {}  # flat indices of the positions that predict an ending's tokens
    for row, trees in enumerate(rows):
        start = 0
        for document, tree in enumerate(trees):
            prefix = tree.prefix
            document_BT[row, start : start + tree.size] = document
            ids_BT[row, start : start + prefix] = tree.inputs[0][:prefix]
            position_BT[row, start : start + prefix] = range(prefix)
            at, origin = start + prefix, row * row_tokens + start
            for branch, ids in enumerate(tree.inputs, start=1):
                end = at + len(ids) - prefix
                ids_BT[row, at:end], branch_BT[row, at:end] = ids[prefix:], branch
                position_BT[row, at:end] = range(prefix, len(ids))
                own = row * row_tokens + at - prefix
                for index in by_input[ids]:
                    predicting = range(endings[index].first - 1, len(ids))
                    places[index] = [(origin if place < prefix else own) + place for place in predicting]
                at = end
            start += tree.size
    lengths = [len(found) for found in places.values()]
    flat = np.fromiter(chain.from_iterable(places.values()), dtype=np.int64)
    ends = (endings[index].ids[endings[index].first :] for index in places)
    targets = np.fromiter(chain.from_iterable(ends), dtype=np.int64)
    scored_N, position_M = np.unique(flat, return_inverse=True)
    order = np.argsort(position_M, kind="stable")
    inputs = [
        torch.from_numpy(np.ascontiguousarray(array)).to(model.embed.weight.device)
        for array in (ids_BT, document_BT, branch_BT, position_BT, scored_N, position_M[order], targets[order])
    ]
    found_2M = model(
        *inputs[:2],
        branch_BT=inputs[2],
        position_BT=inputs[3],
        scored_N=inputs[4],
        score=_TokenScores(inputs[5], inputs[6]),
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
