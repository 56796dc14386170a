"""Advantages from the rewards of the answers to one prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
AdvantageKind = Literal["normalised", "centred", "leave_one_out"]
STD_EPSILON = 1e-4  # added to a group's standard deviation, so that near-equal rewards do not give large advantages


def advantages(reward_PA: FloatArray, kind: AdvantageKind) -> FloatArray:
    """advantage_PA of P prompts with A answers each.

    normalised: (r - mean) / (std + 1e-4), with the group's sample standard deviation (arXiv:2402.03300, sec. 4.1.2).
    centred: r - mean (arXiv:2503.20783). leave_one_out: r minus the mean of the other answers
    (arXiv:2402.14740), which is A / (A - 1) times the centred advantage.
    """
    centred_PA: FloatArray = reward_PA - reward_PA.mean(axis=1, keepdims=True)
    answers = reward_PA.shape[1]
    if kind == "centred" or answers < 2:
        return centred_PA
    if kind == "leave_one_out":
        scale_P1: FloatArray = np.asarray(answers / (answers - 1))
    else:
        scale_P1 = 1 / (reward_PA.std(axis=1, ddof=1, keepdims=True) + STD_EPSILON)
    scaled_PA: FloatArray = centred_PA * scale_P1
    return scaled_PA


def degenerate(reward_PA: FloatArray) -> npt.NDArray[np.bool_]:
    """True for prompts whose answers all got the same reward: their advantages are 0."""
    same_P: npt.NDArray[np.bool_] = np.isclose(reward_PA.max(axis=1), reward_PA.min(axis=1), rtol=0, atol=1e-8)
    return same_P
