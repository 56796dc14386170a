"""Advantages of each token from a learned value (generalised advantage estimation), and the loss it learns by."""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(
    reward_N: Tensor, value_N: Tensor, answer_N: Tensor, *, discount: float = 1.0, decay: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(advantage_N, return_N) of the tokens of answers laid one after another (arXiv:1506.02438, eq. 16).

    delta_t = r_t + discount V_{t+1} - V_t, A_t = delta_t + discount decay A_{t+1}, both 0 after an answer's last token;
    the return that the value should have foreseen is A_t + V_t. answer_N: which answer each token belongs to.
    """
    advantage_N = torch.zeros_like(value_N)
    last, value_after = 0.0, 0.0
    rewards, values, answers = reward_N.tolist(), value_N.tolist(), answer_N.tolist()
    for token in range(len(values) - 1, -1, -1):
        if token + 1 == len(values) or answers[token + 1] != answers[token]:
            last, value_after = 0.0, 0.0
        last = rewards[token] + discount * value_after - values[token] + discount * decay * last
        value_after = values[token]
        advantage_N[token] = last
    return advantage_N, advantage_N + value_N


def whitened(advantage_N: Tensor, weight_N: Tensor) -> Tensor:
    """Advantages with mean 0 and variance 1 over the tokens that count."""
    units = weight_N.sum().clamp(min=1)
    mean = (advantage_N * weight_N).sum() / units
    variance = ((advantage_N - mean) ** 2 * weight_N).sum() / units
    return (advantage_N - mean) * (variance + 1e-8).rsqrt()


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """(loss_N, whether each was clipped): 1/2 max((V - R)^2, (V_clipped - R)^2), where V_clipped stays within `clip` of
    the value at sampling, as the policy's ratio does (the clipped value loss of the implementations of PPO)."""
    clipped_N = torch.clamp(value_N, old_value_N - clip, old_value_N + clip)
    plain_N, held_N = (value_N - return_N) ** 2, (clipped_N - return_N) ** 2
    return 0.5 * torch.maximum(plain_N, held_N), held_N > plain_N
