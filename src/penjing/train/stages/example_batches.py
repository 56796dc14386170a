"""Batches without values, of the largest possible shape, for tracing.

A plan may not have the data that determine a batch's size. So every position holds a token and every token is a target,
the largest possible number.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from penjing.loader.batch import POSITIONS_PER_EDGE, Batch
from penjing.loader.shared_prompt_batch import AnswerBatch


def example_rows(rows: int, seq_len: int, device: torch.device, *, with_edges: bool = False) -> Batch:
    """Packed rows. with_edges: with what is made for a GPU's kernels on the way there."""
    empty = partial(torch.empty, dtype=torch.long, device=device)
    edges = max(64, rows * seq_len // POSITIONS_PER_EDGE) + 1
    return Batch(
        ids_BT=empty(rows, seq_len),
        document_BT=empty(rows, seq_len),
        scored_N=None,
        target_N=empty(rows * seq_len),
        weight_N=empty(rows * seq_len, dtype=torch.float32),
        num_tokens=rows * seq_len,
        cu_seqlens_S=empty(edges, dtype=torch.int32) if with_edges else None,
    )


def example_answers(
    shape: tuple[int, int, int], device: torch.device, *, values: Sequence[str] = (), figures: Sequence[str] = ()
) -> AnswerBatch:
    """Prompts with their answers. shape: (prompts, each in a row of its own; answers to each; positions of a row)."""
    prompts, answers, seq_len = shape
    empty: Any = partial(torch.empty, dtype=torch.long, device=device)
    num_answers = prompts * answers
    num_scored = max(num_answers, prompts * seq_len)
    return AnswerBatch(
        ids_BT=empty(prompts, seq_len),
        document_BT=empty(prompts, seq_len),
        subtree_end_BT=empty(prompts, seq_len),
        position_BT=empty(prompts, seq_len),
        scored_N=empty(num_scored),
        target_N=empty(num_scored),
        weight_N=empty(num_scored, dtype=torch.float32),
        answer_N=empty(num_scored),
        group_A=empty(num_answers),
        figures={name: empty(num_answers, dtype=torch.float32) for name in figures},
        values={name: empty(num_scored, dtype=torch.float32) for name in values},
        num_tokens=prompts * seq_len,
    )
