"""A loss law of one's own: L(N, D) = limit + a / N^alpha + b / D^beta, fitted to a handful of small runs.

The exponents are searched; for each pair the rest is linear and solved exactly (variable projection), which has no
starting point to get stuck at. So few runs cannot tell every exponent apart: those near the corrected published ones
are preferred, as much as one run off by PRIOR_NATS would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.plan.compute_optimal import LAWS, LossLaw
from penjing.plan.step_time import quantile

FINE, COARSE = np.arange(0.10, 0.81, 0.02), np.arange(0.10, 0.81, 0.05)  # exponents that are tried
PRIOR_NATS, PRIOR_WIDTH = 0.02, 0.15  # pull towards the published exponents: of the size of a run's own noise
RESAMPLES = 80
LEAST_RUNS = 4

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LossPoint:
    """One run: parameters, tokens trained on, loss in nats per token on held-out text."""

    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A loss with the range that four of five should fall into, and how well the law fits what it was fitted to."""

    loss: float
    low: float
    high: float
    law: LossLaw
    residual_nats: float  # root mean square over the runs


def fit(points: Sequence[LossPoint], exponents: Array = FINE) -> LossLaw:
    """The law of least squared error in nats. Raises UserError for too few runs, or runs of one size only."""
    if len(points) < LEAST_RUNS:
        raise UserError("too few runs to fit a law", got=len(points), wanted=f"at least {LEAST_RUNS}")
    if len({point.parameters for point in points}) < 2 or len({point.tokens for point in points}) < 2:
        raise UserError("runs of one size or one length tell no law", wanted="at least two sizes and two lengths")
    size_P = np.array([point.parameters for point in points], dtype=np.float64)
    tokens_P = np.array([point.tokens for point in points], dtype=np.float64)
    loss_P = np.array([point.loss for point in points], dtype=np.float64)
    usual = LAWS["corrected"]
    best, best_cost = usual, np.inf
    for alpha in exponents:
        for beta in exponents:
            limit, a, b = _linear(size_P**-alpha, tokens_P**-beta, loss_P)
            error_P = limit + a * size_P**-alpha + b * tokens_P**-beta - loss_P
            away = ((alpha - usual.alpha) ** 2 + (beta - usual.beta) ** 2) / PRIOR_WIDTH**2
            cost = float((error_P**2).sum() + PRIOR_NATS**2 * away)
            if cost < best_cost:
                best, best_cost = LossLaw(float(a), float(b), float(limit), float(alpha), float(beta)), cost
    return best


def _linear(first_P: Array, second_P: Array, loss_P: Array) -> tuple[float, float, float]:
    """limit, a and b of least squares, none below zero: what comes out negative is left out, the rest solved again."""
    columns = {0: np.ones_like(loss_P), 1: first_P, 2: second_P}
    used = [0, 1, 2]
    while True:
        matrix = np.stack([columns[index] for index in used], axis=1)
        scale = np.abs(matrix).max(axis=0)
        solved = np.linalg.lstsq(matrix / scale, loss_P, rcond=None)[0] / scale
        worst = int(np.argmin(solved))
        if solved[worst] >= 0 or len(used) == 1:
            found = dict(zip(used, solved, strict=True))
            return float(found.get(0, 0.0)), float(found.get(1, 0.0)), float(found.get(2, 0.0))
        used.pop(worst)


def forecast(points: Sequence[LossPoint], parameters: float, tokens: float) -> Forecast:
    """The loss of a larger run. The range: residuals drawn anew and the law fitted again, and the residual itself."""
    law = fit(points)
    error_P = np.array([point.loss - law.loss(point.parameters, point.tokens) for point in points])
    freedom = max(1, len(points) - 3)
    residual = float(np.sqrt((error_P**2).sum() / freedom))
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        noise_P = random.normal(0.0, residual, len(points))
        again = [
            LossPoint(point.parameters, point.tokens, law.loss(point.parameters, point.tokens) + float(noise))
            for point, noise in zip(points, noise_P, strict=True)
        ]
        resampled.append(fit(again, COARSE).loss(parameters, tokens) + float(random.normal(0.0, residual)))
    return Forecast(
        loss=law.loss(parameters, tokens),
        low=quantile(resampled, 0.1),
        high=quantile(resampled, 0.9),
        law=law,
        residual_nats=float(np.sqrt((error_P**2).mean())),
    )
