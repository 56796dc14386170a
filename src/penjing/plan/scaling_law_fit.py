"""Fit a scaling law L(N, D) = limit + a / N^alpha + b / D^beta to a few small runs.

The exponents are found by grid search. For each pair the other coefficients are linear and solved exactly (variable
projection), so there is no initial guess and no local minimum. The solutions are matrices times the losses: the refits
of the bootstrap share them, and are as fine as the estimate. Few runs do not determine the exponents: a prior of the
weight of one run off by PRIOR_NATS pulls them towards the corrected published ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.plan.compute_optimal import LAWS, LossLaw

EXPONENTS = np.arange(0.10, 0.81, 0.02)
PRIOR_NATS, PRIOR_WIDTH = 0.02, 0.15  # strength of the prior: about the noise of one run
RESAMPLES = 40  # each with its mirror image
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


def fit(points: Sequence[LossPoint]) -> LossLaw:
    """The law with the least squared error in nats. Raises UserError for too few runs, or runs of one size only."""
    return _fit_all(points, np.zeros((1, len(points))), np.zeros((1, 2)))[0]


def _fit_all(points: Sequence[LossPoint], noise_RP: Array, shift_R2: Array) -> list[LossLaw]:
    """The laws of the runs with R noises added to their losses and R shifts to the exponents that the prior favours."""
    if len(points) < MIN_RUNS:
        raise UserError("too few runs to fit a law", got=len(points), wanted=f"at least {MIN_RUNS}")
    if len({point.parameters for point in points}) < 2 or len({point.tokens for point in points}) < 2:
        raise UserError("runs of one size or one length fit no law", wanted="at least two sizes and two lengths")
    size_P = np.array([point.parameters for point in points], dtype=np.float64)
    tokens_P = np.array([point.tokens for point in points], dtype=np.float64)
    loss_PR = np.array([point.loss for point in points])[:, None] + noise_RP.T
    published = LAWS["corrected"]
    best = [published] * len(noise_RP)
    lowest_R = np.full(len(noise_RP), np.inf)
    for alpha in EXPONENTS:
        favoured_R = (alpha - published.alpha - shift_R2[:, 0]) ** 2
        for beta in EXPONENTS:
            coefficients_3R, error_R = _solve_linear(size_P**-alpha, tokens_P**-beta, loss_PR)
            distance_R = (favoured_R + (beta - published.beta - shift_R2[:, 1]) ** 2) / PRIOR_WIDTH**2
            cost_R = error_R + PRIOR_NATS**2 * distance_R
            for index in np.flatnonzero(cost_R < lowest_R):
                limit, a, b = coefficients_3R[:, index].tolist()
                best[index] = LossLaw(a, b, limit, float(alpha), float(beta))
            lowest_R = np.minimum(lowest_R, cost_R)
    return best


def _solve_linear(first_P: Array, second_P: Array, loss_PR: Array) -> tuple[Array, Array]:
    """Non-negative least squares for limit, a and b, and the squared errors: the best of all sets of positive
    coefficients. Losses are positive."""
    matrix_P3 = np.stack([np.ones_like(first_P), first_P, second_P], axis=1)
    scale_3 = matrix_P3.max(axis=0)
    matrix_P3 = matrix_P3 / scale_3
    best_3R, lowest_R = np.zeros((3, loss_PR.shape[1])), np.full(loss_PR.shape[1], np.inf)
    for count in (3, 2, 1):
        for kept in map(list, combinations(range(3), count)):
            solved_3R = np.zeros_like(best_3R)
            solved_3R[kept] = np.linalg.pinv(matrix_P3[:, kept]) @ loss_PR
            error_R = ((matrix_P3 @ solved_3R - loss_PR) ** 2).sum(axis=0)
            error_R[(solved_3R < 0).any(axis=0)] = np.inf
            better_R = error_R < lowest_R
            best_3R[:, better_R], lowest_R[better_R] = solved_3R[:, better_R], error_R[better_R]
        if count == 3 and np.isfinite(lowest_R).all():  # the unconstrained solutions
            break
    return best_3R / scale_3[:, None], lowest_R


def forecast(points: Sequence[LossPoint], parameters: float, tokens: float) -> Forecast:
    """The loss of a larger run, with the interval of refits with noise in the losses and in the prior's exponents.

    Each noise has its mirror image, so that refits lie around the estimate. One residual more is that of the run.
    """
    law = fit(points)
    error_P = np.array([point.loss - law.loss(point.parameters, point.tokens) for point in points])
    degrees = max(1, len(points) - 3)
    residual = float(np.sqrt((error_P**2).sum() / degrees))
    draw_RS = np.random.default_rng(0).normal(0.0, 1.0, (RESAMPLES, len(points) + 3))
    draw_RS = np.concatenate([draw_RS, -draw_RS])
    noise_RP, shift_R2 = residual * draw_RS[:, 3:], PRIOR_WIDTH * draw_RS[:, 1:3]
    refits = _fit_all(points, noise_RP, shift_R2)
    loss_R = np.array([refit.loss(parameters, tokens) for refit in refits]) + residual * draw_RS[:, 0]
    return Forecast(
        loss=law.loss(parameters, tokens),
        low=float(np.quantile(loss_R, 0.1)),
        high=float(np.quantile(loss_R, 0.9)),
        law=law,
        residual_nats=float(np.sqrt((error_P**2).mean())),
    )
