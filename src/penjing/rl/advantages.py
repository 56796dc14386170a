"""From rewards of the answers to one prompt to advantages."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
AdvantageKind = Literal["normalised", "centred", "leave_one_out"]
SPREAD_FLOOR = 1e-4  # added to a group's spread, so that near-equal rewards are not blown up


def advantages(reward_PA: FloatArray, kind: AdvantageKind) -> FloatArray:
    """advantage_PA of P prompts with A answers each.

    normalised: (r - mean) / (spread + 1e-4), the sample standard deviation of the group (arXiv:2402.03300, sec. 4.1.2).
    centred: r - mean (arXiv:2503.20783). leave_one_out: r minus the mean of the others (arXiv:2402.14740), which is
    A / (A - 1) times the centred one.
    """
    centred_PA: FloatArray = reward_PA - reward_PA.mean(axis=1, keepdims=True)
    answers = reward_PA.shape[1]
    if kind == "centred" or answers < 2:
        return centred_PA
    if kind == "leave_one_out":
        scale_P1: FloatArray = np.asarray(answers / (answers - 1))
    else:
        scale_P1 = 1 / (reward_PA.std(axis=1, ddof=1, keepdims=True) + SPREAD_FLOOR)
    scaled_PA: FloatArray = centred_PA * scale_P1
    return scaled_PA


def degenerate(reward_PA: FloatArray) -> npt.NDArray[np.bool_]:
    """Which prompts' answers all got the same reward: they teach nothing."""
    same_P: npt.NDArray[np.bool_] = np.isclose(reward_PA.max(axis=1), reward_PA.min(axis=1), rtol=0, atol=1e-8)
    return same_P
