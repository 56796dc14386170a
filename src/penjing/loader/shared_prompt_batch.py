"""Packed prompts with several answers each: the prompt is computed once, and the answers branch off it.

Preference pairs, sampled groups (reinforcement learning) and distillation use this form. A prompt of p tokens with
answers of a and b tokens takes p + a + b positions instead of 2 p + a + b. Each answer attends to the prompt and to
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.data.packing.concat import best_fit
from penjing.loader.batch import to_device

# The row length is that of the longest row, rounded up to a multiple of this: few shapes, little padding.
ROW_MULTIPLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One continuation of a prompt.

    ids: its tokens, with the end of turn. weights: 1 for tokens that the model generated, 0 for others (the result of a
    tool); None: 1 everywhere. values: further values of each token by name, as long as ids (`behaviour`:
    log-probability when it was sampled, `reference`, `advantage`...).
    """

    ids: Sequence[int]
    weights: Sequence[float] | None = None
    values: dict[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and its answers. figures: values of each answer by name (`reward`, `advantage`, `label`...)."""

    prompt: Sequence[int]
    answers: Sequence[Answer]
    figures: dict[str, Sequence[float]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Positions that it takes; an answer's last token is only a target, so it takes none."""
        return len(self.prompt) + sum(len(answer.ids) - 1 for answer in self.answers)


@dataclass(frozen=True, kw_only=True)
class AnswerBatch:
    """Groups as tensors.

    ids_BT, document_BT (the group; -1: padding), subtree_end_BT (see `tree_mask`: where the group ends, or the answer,
    or the row), position_BT: inputs of the model. scored_N: flat index (row * T + position) of the position that
    predicts each answer token; target_N: the token; weight_N: 1 if the model generated it, else 0; answer_N: its
    answer, 0..A-1, non-decreasing. group_A: the group of each answer, non-decreasing. figures: values of each answer,
    [A] by name. values: values of each answer token, [N] by name. num_tokens: positions without padding.
    """

    ids_BT: Tensor
    document_BT: Tensor
    subtree_end_BT: Tensor
    position_BT: Tensor
    scored_N: Tensor
    target_N: Tensor
    weight_N: Tensor
    answer_N: Tensor
    group_A: Tensor
    figures: dict[str, Tensor]
    values: dict[str, Tensor]
    num_tokens: int

    @property
    def num_answers(self) -> int:
        return len(self.group_A)

    def sum_A(self, value_N: Tensor) -> Tensor:
        """Sum over each answer's generated tokens: [A]."""
        sums = value_N.new_zeros(self.num_answers)
        return sums.index_add(0, self.answer_N, value_N * self.weight_N.to(value_N.dtype))

    def length_A(self) -> Tensor:
        """The number of generated tokens of each answer."""
        return self.sum_A(torch.ones_like(self.weight_N))

    def row_A(self) -> Tensor:
        row_N = self.scored_N // self.ids_BT.shape[1]
        rows_A = torch.zeros(self.num_answers, dtype=torch.long, device=row_N.device)
        return rows_A.index_copy(0, self.answer_N, row_N)

    def units_B(self, units_A: Tensor) -> Tensor:
        """The weight of each row: the sum of its answers' units."""
        return units_A.new_zeros(len(self.ids_BT)).index_add_(0, self.row_A(), units_A)

    def to(self, device: torch.device) -> AnswerBatch:
        """The same batch on `device`; copies from pinned memory do not wait for the device."""
        return replace(self, **to_device(vars(self), device))


def pack(groups: Sequence[Group], seq_len: int) -> AnswerBatch:
    """Pack groups into rows of at most `seq_len` positions; answers keep the order of their groups. Raises UserError if
    a group is longer than a row."""
    assert groups and all(group.prompt and group.answers for group in groups), "a group has a prompt and an answer"
    sizes = [group.num_tokens for group in groups]
    if max(sizes) > seq_len:
        what = "a prompt and its answers are longer than a row"
        raise UserError(what, where="data.seq_len", got=seq_len, wanted=f"at least {max(sizes)}")
    rows = [sorted(row) for row in best_fit(np.array(sizes), seq_len)]
    longest = max(sum(sizes[index] for index in row) for row in rows)
    num_tokens = min(seq_len, -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE)
    ids_BT = np.zeros((len(rows), num_tokens), dtype=np.int64)
    document_BT = np.full_like(ids_BT, -1)
    subtree_end_BT, position_BT = np.full_like(ids_BT, num_tokens), np.zeros_like(ids_BT)
    scored: dict[int, list[np.ndarray[Any, Any]]] = {}
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            group = groups[index]
            length = len(group.prompt)
            ids_BT[row, start : start + length] = group.prompt
            position_BT[row, start : start + length] = np.arange(length)
            document_BT[row, start : start + sizes[index]] = index
            subtree_end_BT[row, start : start + length] = start + sizes[index]
            last, start = start + length - 1, start + length
            scored[index] = []
            for answer in group.answers:
                read = len(answer.ids) - 1
                ids_BT[row, start : start + read] = answer.ids[:-1]
                subtree_end_BT[row, start : start + read] = start + read
                position_BT[row, start : start + read] = length + np.arange(read)
                predicting = np.concatenate(([last], np.arange(start, start + read)))
                scored[index].append(row * num_tokens + predicting)
                start += read
    answers = [answer for group in groups for answer in group.answers]
    lengths = [len(answer.ids) for answer in answers]
    names = sorted({name for answer in answers for name in answer.values})

    def of_tokens(values: list[Sequence[float]]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.float32) for part in values]))

    return AnswerBatch(
        ids_BT=torch.from_numpy(ids_BT),
        document_BT=torch.from_numpy(document_BT),
        subtree_end_BT=torch.from_numpy(subtree_end_BT),
        position_BT=torch.from_numpy(position_BT),
        scored_N=torch.from_numpy(np.concatenate([part for index in range(len(groups)) for part in scored[index]])),
        target_N=torch.from_numpy(np.concatenate([np.asarray(answer.ids, dtype=np.int64) for answer in answers])),
        weight_N=of_tokens([answer.weights or [1.0] * len(answer.ids) for answer in answers]),
        answer_N=torch.from_numpy(np.repeat(np.arange(len(answers)), lengths)),
        group_A=torch.from_numpy(np.repeat(np.arange(len(groups)), [len(group.answers) for group in groups])),
        figures={
            name: of_tokens([group.figures[name] for group in groups])
            for name in sorted({name for group in groups for name in group.figures})
        },
        values={name: of_tokens([answer.values[name] for answer in answers]) for name in names},
        num_tokens=sum(sizes),
    )
