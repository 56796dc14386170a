"""Figures as people read them, at the edges where they are often wrong."""

from __future__ import annotations

import pytest

from penjing.base import formatting as units


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (1_234_567, "1.23M"), (25_830_000, "25.8M"), (3.5e9, "3.5B"), (2e12, "2T")],
)
def test_count(number: float, text: str) -> None:
    assert units.count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999_499, "999k"), (999_600, "1M"), (999_999_999, "1B"), (1e15, "1000T"), (-999_999, "-1M")]
)
def test_count_where_rounding_crosses_a_unit(number: float, text: str) -> None:
    assert units.count(number) == text


@pytest.mark.parametrize(("number", "text"), [(646.342117, "646.3"), (999.96, "1000"), (-0.51234, "-0.5123")])
def test_small_figures_are_rounded_too(number: float, text: str) -> None:
    assert units.count(number) == text


def test_gib_and_gb_are_not_mixed() -> None:
    assert units.gibibytes(2**30) == "1.00 GiB"
    assert units.gibibytes(10**9) == "0.93 GiB"
    assert units.gibibytes(2**20) == "1.0 MiB"
    assert units.megabytes(10**6) == "1.0 MB"
    assert units.megabytes(1500) == "1.5 kB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (45, "45 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86_400, "1 d 00 h"),
        (273_600, "3 d 04 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text
