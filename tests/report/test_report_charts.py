"""Charts: nothing that a stage may leave behind (no points, one, NaN) breaks them."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from penjing.report import charts
from penjing.report.charts import Axis, Series

X, Y = Axis("tokens"), Axis("nats per token")


def read(markup: str) -> dict[str, Any]:
    """The chart that the browser gets; the markup is well formed."""
    return json.loads(ElementTree.fromstring(markup).attrib["data-chart"], parse_constant=pytest.fail)


def drawn(points: list[tuple[float | None, float | None]], y: Axis = Y, name: str = "a") -> list[tuple[float, float]]:
    (line,) = read(charts.line_chart([Series(name, points)], title="t", x=X, y=y))["series"]
    return list(zip(line["x"], line["y"], strict=True))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, "0"),
        (0.0031, "0.0031"),
        (2.413, "2.41"),
        (850, "850"),
        (20400, "20.4k"),
        (999_600, "1M"),
        (3e-6, "3×10⁻⁶"),
        (-1.5e7, "-15M"),
    ],
)
def test_figure(value: float, wanted: str) -> None:
    assert charts.figure(value) == wanted


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-300, 1e199])
def test_constant_series(value: float) -> None:
    assert drawn([(9, value), (0, value), (5, value)]) == [(0, value), (5, value), (9, value)]


@pytest.mark.parametrize("axis", [Y, Axis("y", log=True), Axis("y", from_zero=True)])
def test_values_that_cannot_be_drawn_are_left_out(axis: Axis) -> None:
    bad = [None, math.nan, math.inf, -math.inf, 1e308]
    points: list[tuple[float | None, float | None]] = [(index, value) for index, value in enumerate(bad)]
    points += [(None, 1.0), (math.nan, 1.0), (7, 1.0), (8, 2.0)]
    assert drawn(points, axis) == [(7, 1.0), (8, 2.0)]


def test_log_axis_leaves_out_what_is_not_positive() -> None:
    assert drawn([(1, 0.0), (2, -1.0), (3, 10.0), (4, 1000.0)], Axis("y", log=True)) == [(3, 10), (4, 1000)]


def test_nothing_to_draw_is_nothing() -> None:
    for series in ([], [Series("a", [])], [Series("a", [(1, None)])]):
        assert charts.line_chart(series, title="t", x=X, y=Y) == ""


def test_texts_are_escaped() -> None:
    bad = '</div><script>alert("1")</script>\''
    markup = str(charts.line_chart([Series(bad, [(1, 2)])], title=bad, x=X, y=Axis(bad)))
    assert "<script" not in markup and "</div><" not in markup
    ElementTree.fromstring(markup)


def test_colours_stay_with_their_series() -> None:
    series = [Series("training", []), Series("validation", [(1, 2), (2, 3)])]
    assert [line["colour"] for line in read(charts.line_chart(series, title="t", x=X, y=Y))["series"]] == [1]


def test_a_chart_is_described_in_words() -> None:
    markup = charts.line_chart([Series("a", [(1, 4.0), (2, 9.5), (3, 2.0)])], title="t", x=X, y=Y)
    assert "a: 4 at 1 to 2 at 3 tokens, lowest 2, highest 9.5" in ElementTree.fromstring(markup).attrib["aria-label"]
