"""Charts: nothing that a stage may leave behind (no points, one, NaN) breaks them."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from penjing.base.accuracy import AccuracyLine, Score
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
    assert charts.fraction_bars([], [], ("a", "b"), title="t") == ""
    assert charts.span_bar(0, 1, 0, "done", "note") == ""


def test_texts_are_escaped() -> None:
    bad = '</svg><script>alert("1")</script>\''
    for markup in (
        str(charts.line_chart([Series(bad, [(1, 2)])], title=bad, x=X, y=Axis(bad))),
        str(charts.fraction_bars([line(5, 1)], [bad], (bad, "b"), title=bad)),
        str(charts.span_bar(0, 1, 2, "done", bad)),
    ):
        assert "<script" not in markup and "</svg><" not in markup
        ElementTree.fromstring(markup)


def test_colours_stay_with_their_series() -> None:
    series = [Series("training", []), Series("validation", [(1, 2), (2, 3)])]
    assert [line["colour"] for line in read(charts.line_chart(series, title="t", x=X, y=Y))["series"]] == [1]


def line(right: int, right_after: int | None = None, chance: float | None = 0.25) -> AccuracyLine:
    before = Score(total=10, correct=right, chance=chance)
    after = Score(total=0, correct=0) if right_after is None else Score(total=10, correct=right_after, chance=chance)
    return AccuracyLine(kind="sums", language="en", before=before, after=after)


def test_bars_with_their_intervals_and_chance() -> None:
    markup = str(charts.fraction_bars([line(10, 0), line(4), line(4, chance=None)], list("abc"), ("x", "y"), title="t"))
    bars = ElementTree.fromstring(markup).findall("rect")
    assert [bar.attrib["class"][-1] for bar in bars] == ["1", "0", *"0100"]  # the legend, from the right; the bars
    assert markup.count('class="whisker"') == 4 and markup.count('class="chance"') == 2
    assert "x: 10 of 10 (95 % interval 72 % to 100 %)" in markup and ">100 %<" in markup


def test_whiskers_reach_from_the_low_to_the_high_end_of_the_interval() -> None:
    """3 of 10: Wilson's interval is 10.8 % to 60.3 %; and the bar and the mark of chance by the same scale."""
    tree = ElementTree.fromstring(str(charts.fraction_bars([line(3)], ["a"], ("x", "y"), title="t")))
    rules = {kind: [rule.attrib for rule in tree.iter("line") if rule.attrib["class"] == kind] for kind in
             ("grid", "whisker", "chance")}  # fmt: skip
    grid = [float(rule["x1"]) for rule in rules["grid"]]
    zero, one = min(grid), max(grid)
    assert grid == pytest.approx([zero + tick * (one - zero) for tick in (0, 0.25, 0.5, 0.75, 1)], abs=0.1)

    def fraction(x: str) -> float:
        return (float(x) - zero) / (one - zero)

    (whisker,), (chance,) = rules["whisker"], rules["chance"]
    assert fraction(whisker["x1"]) == pytest.approx(0.108, abs=0.002)
    assert fraction(whisker["x2"]) == pytest.approx(0.603, abs=0.002)
    assert fraction(chance["x1"]) == fraction(chance["x2"]) == pytest.approx(0.25, abs=0.002)
    (bar,) = [rect.attrib for rect in tree.iter("rect") if rect.find("title") is not None]
    assert float(bar["x"]) == pytest.approx(zero, abs=0.1)
    assert float(bar["width"]) == pytest.approx(0.3 * (one - zero), abs=0.2)
    assert float(bar["y"]) < float(whisker["y1"]) == float(whisker["y2"]) < float(bar["y"]) + float(bar["height"])


def test_a_chart_is_described_in_words() -> None:
    markup = charts.line_chart([Series("a", [(1, 4.0), (2, 9.5), (3, 2.0)])], title="t", x=X, y=Y)
    assert "a: 4 at 1 to 2 at 3 tokens, lowest 2, highest 9.5" in ElementTree.fromstring(markup).attrib["aria-label"]


def test_shorten_counts_chinese_as_wide() -> None:
    assert charts.shorten("abc", 100) == "abc"
    assert charts.text_width("松树") == charts.text_width("abcd")
    assert charts.text_width(charts.shorten("松树" * 30, 80)) <= 80 + charts.CHARACTER_WIDTH
