"""Batches without data, for tracing: of the largest shape a run can meet, on the meta device.

What a batch weighs depends on the data, which a plan may not have. Unless told otherwise every position holds a token
and every token is learned from, which is the most there can be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penjing.loader.batch import POSITIONS_PER_EDGE, Batch
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.objective.distill import Distill, TaughtBatch
from penjing.objective.policy import COUNTS, Policy
from penjing.objective.preference import MISMATCHED, REFERENCE, WANTED, Preference
from penjing.objective.reward_model import MARGIN
from penjing.train.config import Run

META = torch.device("meta")


def make_batch(
    run: Run, rows: int, scored_fraction: float, *, reference_given: bool = False, on_cuda: bool = False
) -> Any:
    """A batch as the run's stage would bring it, `rows` units (rows, pairs, prompts) large.

    scored_fraction: share of the positions that reach the head. reference_given: the reference's log-probabilities
    come with the batch. on_cuda: with what is made for CUDA's kernels on the way there.
    """
    settings = run.objective
    if isinstance(settings, Distill) and settings.mode == "on_policy":
        return _answers(run, rows, 1, scored_fraction, values=("given",))
    if settings.kind in ("next_token", "distill"):
        return _rows(run, rows, scored_fraction, on_cuda=on_cuda)
    if isinstance(settings, Preference):
        values: tuple[str, ...] = (REFERENCE,) if reference_given else ()
        return _answers(run, rows, 2, scored_fraction, values=values, figures=(WANTED, MISMATCHED))
    if isinstance(settings, Policy):
        known = ("behaviour", "reference", "advantage", "value", "return")
        kept = tuple(name for name in known if name != "reference" or settings.kl_weight)
        kept = kept if settings.loss == "ppo" else tuple(name for name in kept if name not in ("value", "return"))
        # A prompt's answers branch off it in one row.
        return _answers(run, rows, settings.rollout.answers, scored_fraction, values=kept, figures=(COUNTS,))
    return _answers(run, rows, 2, scored_fraction, figures=(MARGIN,))


def _empty(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _rows(run: Run, rows: int, scored_fraction: float, *, on_cuda: bool) -> Batch:
    tokens = run.data.row_tokens
    num_scored = max(1, round(rows * tokens * scored_fraction))
    parts: dict[str, Any] = dict(
        ids_BT=_empty(rows, tokens),
        document_BT=_empty(rows, tokens),
        scored_N=None if num_scored == rows * tokens else _empty(num_scored),
        target_N=_empty(num_scored),
        weight_N=_empty(num_scored, dtype=torch.float32),
        num_tokens=rows * tokens,
        edge_S=_empty(max(64, rows * tokens // POSITIONS_PER_EDGE) + 1, dtype=torch.int32) if on_cuda else None,
    )
    settings = run.objective
    if isinstance(settings, Distill) and settings.mode == "top_k":
        width = settings.top_k
        return TaughtBatch(
            **parts,
            top_id_NK=_empty(num_scored, width, dtype=torch.int32),
            top_logp_NJ=_empty(num_scored, width + 1, dtype=torch.float16),
        )
    return Batch(**parts)


def _answers(
    run: Run,
    groups: int,
    answers: int,
    scored_fraction: float,
    *,
    values: tuple[str, ...] = (),
    figures: tuple[str, ...] = (),
) -> AnswerBatch:
    tokens = run.data.row_tokens
    shape, num_answers = (groups, tokens), groups * answers
    num_scored = max(num_answers, round(groups * tokens * scored_fraction))
    return AnswerBatch(
        ids_BT=_empty(*shape),
        document_BT=_empty(*shape),
        branch_BT=_empty(*shape),
        position_BT=_empty(*shape),
        scored_N=_empty(num_scored),
        target_N=_empty(num_scored),
        weight_N=_empty(num_scored, dtype=torch.float32),
        answer_N=_empty(num_scored),
        group_A=_empty(num_answers),
        figures={name: _empty(num_answers, dtype=torch.float32) for name in figures},
        values={name: _empty(num_scored, dtype=torch.float32) for name in values},
        num_tokens=groups * tokens,
    )


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of a batch."""
    found: list[Tensor] = []
    for value in vars(batch).values():
        inner = value.values() if isinstance(value, dict) else (value,)
        found += [tensor for tensor in inner if isinstance(tensor, Tensor)]
    return found
