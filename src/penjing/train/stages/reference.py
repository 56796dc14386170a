"""The frozen reference model of a run: its start weights."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.model.lora import adapter_scope, remove_adapters
from penjing.model.transformer import Transformer
from penjing.objective.run_model import run_model
from penjing.train.precision import Precision

LogProbs = Callable[[AnswerBatch], Tensor]
"""Computes logp_N of a batch, without a gradient."""


def frozen_copy(model: Transformer, precision: Precision) -> Transformer:
    """A frozen copy without adapters, with its matrices stored in the dtype of the matmuls."""
    copied = copy.deepcopy(model)
    remove_adapters(copied)
    copied.requires_grad_(False).eval()
    precision.cast_frozen(copied)
    return copied


@torch.no_grad()
def answer_log_probs(model: Callable[..., Any], batch: AnswerBatch, temperature: float = 1.0) -> Tensor:
    """logp_N of a batch. Without gradients there is no dropout, and a mixture returns no router statistics."""
    logp_2N: Tensor = run_model(model, batch, temperature=temperature)
    return logp_2N[0]


def base_log_probs(model: Transformer, batch: AnswerBatch, temperature: float = 1.0) -> Tensor:
    """logp_N of a batch under the model without its adapters."""
    with adapter_scope(model, None):
        return answer_log_probs(model, batch, temperature)
