"""How sure a fraction is."""

from __future__ import annotations

import math

Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution


def wilson(right: int, asked: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a fraction (Wilson 1927); with nothing asked it is the whole of [0, 1].

    centre = (p + z^2/2n) / (1 + z^2/n), half width = z/(1 + z^2/n) * sqrt(p(1-p)/n + z^2/4n^2)
    """
    if asked <= 0:
        return 0.0, 1.0
    fraction = right / asked
    shrink = 1 + z * z / asked
    centre = (fraction + z * z / (2 * asked)) / shrink
    half = z / shrink * math.sqrt(fraction * (1 - fraction) / asked + z * z / (4 * asked * asked))
    return max(centre - half, 0.0), min(centre + half, 1.0)
