"""Fit a scaling law L(N, D) = limit + a / N^alpha + b / D^beta to a few small runs.

The exponents are found by grid search. For each pair the other coefficients are linear and solved exactly (variable
projection), so there is no initial guess and no local minimum. Few runs do not determine the exponents: a prior of the
weight of one run off by PRIOR_NATS pulls them towards the corrected published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.plan.compute_optimal import LAWS, LossLaw
from penjing.plan.step_time import quantile

FINE, COARSE = np.arange(0.10, 0.81, 0.02), np.arange(0.10, 0.81, 0.05)  # grids of exponents
PRIOR_NATS, PRIOR_WIDTH = 0.02, 0.15  # strength of the prior: about the noise of one run
RESAMPLES = 80
MIN_RUNS = 4

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LossPoint:
    """One run: parameters, tokens trained on, loss in nats per token on held-out text."""

    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted loss with its 80 % interval, and the residual of the fit."""

    loss: float
    low: float
    high: float
    law: LossLaw
    residual_nats: float  # root mean square over the runs


def fit(points: Sequence[LossPoint], exponents: Array = FINE) -> LossLaw:
    """The law with the least squared error in nats. Raises UserError for too few runs, or runs of one size only."""
    if len(points) < MIN_RUNS:
        raise UserError("too few runs to fit a law", got=len(points), wanted=f"at least {MIN_RUNS}")
    if len({point.parameters for point in points}) < 2 or len({point.tokens for point in points}) < 2:
        raise UserError("runs of one size or one length fit no law", wanted="at least two sizes and two lengths")
    size_P = np.array([point.parameters for point in points], dtype=np.float64)
    tokens_P = np.array([point.tokens for point in points], dtype=np.float64)
    loss_P = np.array([point.loss for point in points], dtype=np.float64)
    published = LAWS["corrected"]
    best, best_cost = published, np.inf
    for alpha in exponents:
        for beta in exponents:
            limit, a, b = _solve_linear(size_P**-alpha, tokens_P**-beta, loss_P)
            error_P = limit + a * size_P**-alpha + b * tokens_P**-beta - loss_P
            distance = ((alpha - published.alpha) ** 2 + (beta - published.beta) ** 2) / PRIOR_WIDTH**2
            cost = float((error_P**2).sum() + PRIOR_NATS**2 * distance)
            if cost < best_cost:
                best, best_cost = LossLaw(float(a), float(b), float(limit), float(alpha), float(beta)), cost
    return best


def _solve_linear(first_P: Array, second_P: Array, loss_P: Array) -> tuple[float, float, float]:
    """Non-negative least squares for limit, a and b: drop the most negative one and solve again."""
    columns = {0: np.ones_like(loss_P), 1: first_P, 2: second_P}
    columns_left = [0, 1, 2]
    while True:
        matrix = np.stack([columns[index] for index in columns_left], axis=1)
        scale = np.abs(matrix).max(axis=0)
        coefficients = np.linalg.lstsq(matrix / scale, loss_P, rcond=None)[0] / scale
        smallest = int(np.argmin(coefficients))
        if coefficients[smallest] >= 0 or len(columns_left) == 1:
            solution = dict(zip(columns_left, coefficients, strict=True))
            return float(solution.get(0, 0.0)), float(solution.get(1, 0.0)), float(solution.get(2, 0.0))
        columns_left.pop(smallest)


def forecast(points: Sequence[LossPoint], parameters: float, tokens: float) -> Forecast:
    """The loss of a larger run. The interval: parametric bootstrap of the residuals, plus one residual."""
    law = fit(points)
    error_P = np.array([point.loss - law.loss(point.parameters, point.tokens) for point in points])
    degrees = max(1, len(points) - 3)
    residual = float(np.sqrt((error_P**2).sum() / degrees))
    rng = np.random.default_rng(0)
    losses, estimate = [], law.loss(parameters, tokens)
    for _ in range(RESAMPLES):
        noise_P = rng.normal(0.0, residual, len(points))
        resampled_points = [
            LossPoint(point.parameters, point.tokens, law.loss(point.parameters, point.tokens) + float(noise))
            for point, noise in zip(points, noise_P, strict=True)
        ]
        losses.append(fit(resampled_points, COARSE).loss(parameters, tokens) + float(rng.normal(0.0, residual)))
    return Forecast(
        loss=estimate,
        # The prior and the bounds pull refits to one side: the interval always contains the estimate.
        low=min(estimate, quantile(losses, 0.1)),
        high=max(estimate, quantile(losses, 0.9)),
        law=law,
        residual_nats=float(np.sqrt((error_P**2).mean())),
    )
