"""Seeds never change: data orders, splits and starting weights of published runs hang on them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penjing.base.seeds import derive, fraction


def test_pinned() -> None:
    assert derive(0) == 3456079177858693020
    assert derive(1, "weights") == 5164344575451445340
    assert derive(7, "documents", 3) == 4992119444018921483
    assert fraction(0, "held out", "你好") == 0.5105173740956692


@given(st.integers(), st.text(), st.integers())
def test_in_range(seed: int, name: str, index: int) -> None:
    assert 0 <= derive(seed, name, index) < 2**63
    assert 0 <= fraction(seed, name, index) <= 1


def test_every_argument_counts() -> None:
    seeds = {derive(seed, name, index) for seed in range(5) for name in ("order", "rows") for index in range(5)}
    assert len(seeds) == 50


def test_fractions_are_spread_evenly() -> None:
    below = sum(fraction(0, "held out", index) < 0.3 for index in range(10_000))
    assert abs(below - 3000) < 4 * (10_000 * 0.3 * 0.7) ** 0.5
