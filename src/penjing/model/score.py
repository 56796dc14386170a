"""What an objective computes from the last hidden states. It runs inside `forward`, so that a wrapped model (DDP, FSDP)
stays one callable, and in blocks of positions, so that all logits never exist at once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from penjing.kernels import ops

# hidden_ND, weight_VD of the head, dtype of its matmuls -> the score (kernels/fused_distillation_loss.py has another)
Score = Callable[[Tensor, Tensor, torch.dtype], Tensor]


class CrossEntropy(NamedTuple):
    """-sum_n weight_n log p(target_n), a scalar in nats."""

    target_N: Tensor
    weight_N: Tensor

    def __call__(self, hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        return ops.fused_linear_cross_entropy(hidden_ND, weight_VD, self.target_N, self.weight_N, dtype)


class CrossEntropyOfTwo(NamedTuple):
    """-sum_n weight_n log p of two targets under the same logits: a vector of two sums, in nats.

    Both need one softmax: log p(target_n) - log p(second_n) is the difference of their two logits.
    """

    target_N: Tensor
    second_N: Tensor
    weight_N: Tensor

    def __call__(self, hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        nats = ops.fused_linear_cross_entropy(hidden_ND, weight_VD, self.target_N, self.weight_N, dtype)
        rows_ND = functional.embedding(self.target_N, weight_VD) - functional.embedding(self.second_N, weight_VD)
        differences_N = (hidden_ND.float() * rows_ND.float()).sum(dim=1)
        return torch.stack([nats, nats + (self.weight_N * differences_N).sum()])


class LogProbs(NamedTuple):
    """logp_2N in float32: the log-probability of each target, and the entropy of its prediction in nats (no
    gradient). temperature: logits are divided by it before."""

    target_N: Tensor
    temperature: float = 1.0

    def __call__(self, hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        if self.temperature != 1.0:
            hidden_ND = hidden_ND / self.temperature  # the head is linear and has no bias
        return ops.log_probs(hidden_ND, weight_VD, self.target_N, dtype)
