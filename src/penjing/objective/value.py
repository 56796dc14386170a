"""Generalised advantage estimation from a learned value, and the value's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(
    reward_N: Tensor, value_N: Tensor, answer_N: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(advantage_N, return_N) of the tokens of answers laid one after another (arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, both 0 after an answer's last token. The
    return, which the value should predict, is A_t + V_t. answer_N: the answer of each token.
    """
    advantage_N = torch.zeros_like(value_N)
    advantage, value_after = 0.0, 0.0
    rewards, values, answers = reward_N.tolist(), value_N.tolist(), answer_N.tolist()
    for token in range(len(values) - 1, -1, -1):
        if token + 1 == len(values) or answers[token + 1] != answers[token]:
            advantage, value_after = 0.0, 0.0
        advantage = rewards[token] + gamma * value_after - values[token] + gamma * gae_lambda * advantage
        value_after = values[token]
        advantage_N[token] = advantage
    return advantage_N, advantage_N + value_N


def whiten(advantage_N: Tensor, weight_N: Tensor) -> Tensor:
    """Advantages with mean 0 and variance 1 over tokens, weighted by `weight_N`."""
    units = weight_N.sum().clamp(min=1)
    mean = (advantage_N * weight_N).sum() / units
    variance = ((advantage_N - mean) ** 2 * weight_N).sum() / units
    return (advantage_N - mean) * (variance + 1e-8).rsqrt()


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float = 0.2) -> tuple[Tensor, Tensor]:
    """(loss_N, whether each was clipped): 1/2 max((V - R)^2, (V_clipped - R)^2), where V_clipped is V clipped to within
    `clip` of the value at sampling (the clipped value loss of common PPO implementations)."""
    clipped_N = torch.clamp(value_N, old_value_N - clip, old_value_N + clip)
    unclipped_loss_N, clipped_loss_N = (value_N - return_N) ** 2, (clipped_N - return_N) ** 2
    return 0.5 * torch.maximum(unclipped_loss_N, clipped_loss_N), clipped_loss_N > unclipped_loss_N
