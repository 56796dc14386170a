"""Strengths of models from votes between pairs of them (Bradley and Terry 1952), with 95 % intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penjing.base.accuracy import Z_95

Vote = tuple[str, str, float]  # two models, and the first one's score: 1 better, 0 worse, 0.5 a tie


class Strength(NamedTuple):
    """One model's log-strength; `low` and `high` bound it with 95 %. The mean of each group is 0."""

    model: str
    strength: float
    low: float
    high: float
    won: int
    tied: int
    lost: int


def strengths(votes: Sequence[Vote]) -> list[list[Strength]]:
    """Groups of models that votes connect, the strongest first. exp(a) / (exp(a) + exp(b)) of the votes between models
    of strength a and b are for the first.

    The maximum of the likelihood by Newton's method. Each pair that met has half a vote more for each side, which keeps
    strengths finite and takes out most of the bias (Haldane 1956). The intervals are from the Hessian.
    """
    models = sorted({model for first, second, _ in votes for model in (first, second)})
    place = {model: at for at, model in enumerate(models)}
    wins = np.zeros((len(models), len(models)))
    counts = np.zeros((len(models), 3), int)
    for first, second, score in votes:
        i, j = place[first], place[second]
        wins[i, j] += score
        wins[j, i] += 1 - score
        counts[i, round(2 - 2 * score)] += 1
        counts[j, round(2 * score)] += 1
    met = wins + wins.T > 0
    wins += met / 2
    played, theta = wins + wins.T, np.zeros(len(models))
    groups = np.linalg.matrix_power(met | np.eye(len(models), dtype=bool), len(models))  # who is connected with whom
    for _ in range(100):
        chance = 1 / (1 + np.exp(theta[None, :] - theta[:, None]))
        weight = played * chance * (1 - chance)
        # A group that shifts as a whole changes no chance: `groups` makes the Hessian regular, with means of 0.
        inverse = np.linalg.inv(np.diag(weight.sum(1)) - weight + groups)
        step = np.clip(inverse @ (wins - played * chance).sum(1), -1, 1)
        theta += step
        if abs(step).max(initial=0) < 1e-9:
            break
    half = Z_95 * np.sqrt(np.diag(inverse) - 1 / groups.sum(1) ** 2)
    rows = [
        Strength(model, theta[at], theta[at] - half[at], theta[at] + half[at], *counts[at].tolist())
        for model, at in place.items()
    ]
    members = {tuple(group): np.flatnonzero(group) for group in groups}
    return [sorted((rows[at] for at in group), key=lambda row: -row.strength) for group in members.values()]
