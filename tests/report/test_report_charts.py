"""Charts: sensible ticks, and nothing that a stage may leave behind (no points, one, NaN) breaks them."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from penjing.base.accuracy import AccuracyLine, Score
from penjing.report import charts
from penjing.report.charts import Axis, Scale, Series

X, Y = Axis("tokens"), Axis("nats per token")


def drawn(points: list[tuple[float | None, float | None]], y: Axis = Y, name: str = "a") -> str:
    markup = str(charts.line_chart([Series(name, points, dots=True)], title="t", x=X, y=y))
    ElementTree.fromstring(markup)  # well formed
    assert not re.search(r"nan|inf", markup, re.IGNORECASE)
    return markup


def test_ticks_are_round_and_inside() -> None:
    assert charts.linear_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert charts.linear_ticks(1.93, 8.2, 5) == [2, 4, 6, 8]
    assert charts.log_ticks(0.8, 30) == [1, 2, 5, 10, 20]
    assert charts.log_ticks(1e-6, 1e6, 4) == pytest.approx([1e-6, 1e-3, 1, 1e3, 1e6])


def test_tick_labels_share_a_unit_and_differ() -> None:
    assert charts.tick_labels([0, 5e6, 10e6, 15e6]) == ["0", "5M", "10M", "15M"]
    assert charts.tick_labels([0.5, 0.75, 1.0]) == ["0.50", "0.75", "1.00"]
    assert charts.tick_labels([0, 0.001, 0.002]) == ["0", "1×10⁻³", "2×10⁻³"]
    for low, high in ((1.9, 1.91), (1e-9, 3e-9), (-5, 5), (0, 123456), (1e20, 3e20)):
        labels = charts.tick_labels(charts.linear_ticks(low, high))
        assert len(labels) >= 2 and len(set(labels)) == len(labels)


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


def test_log_scale_puts_a_decade_halfway() -> None:
    assert Scale(1, 100, 0, 200, log=True).at(10) == pytest.approx(100)


def test_one_point_is_a_dot_without_a_line() -> None:
    markup = drawn([(1.0, 2.0)])
    assert markup.count("<circle") == 1 and "<polyline" not in markup


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-300, 1e199])
def test_constant_series(value: float) -> None:
    assert drawn([(0, value), (5, value), (9, value)]).count("<circle") == 3


@pytest.mark.parametrize("axis", [Y, Axis("y", log=True), Axis("y", from_zero=True)])
def test_values_that_cannot_be_drawn_are_left_out(axis: Axis) -> None:
    bad = [None, math.nan, math.inf, -math.inf, 1e308]
    points: list[tuple[float | None, float | None]] = [(index, value) for index, value in enumerate(bad)]
    points += [(None, 1.0), (math.nan, 1.0), (7, 1.0), (8, 2.0)]
    assert drawn(points, axis).count("<circle") == 2


def test_log_axis_leaves_out_what_is_not_positive() -> None:
    assert drawn([(1, 0.0), (2, -1.0), (3, 10.0), (4, 1000.0)], Axis("y", log=True)).count("<circle") == 2


def test_nothing_to_draw_is_nothing() -> None:
    for series in ([], [Series("a", [])], [Series("a", [(1, None)])]):
        assert charts.line_chart(series, title="t", x=X, y=Y) == ""
    assert charts.fraction_bars([], [], ("a", "b"), title="t") == ""
    assert charts.span_bar(0, 1, 0, "done", "note") == ""


def test_texts_are_escaped() -> None:
    bad = '</svg><script>alert("1")</script>\''
    for markup in (
        drawn([(1, 2)], Axis(bad), bad),
        str(charts.fraction_bars([line(5, 1)], [bad], (bad, "b"), title=bad)),
        str(charts.span_bar(0, 1, 2, "done", bad)),
    ):
        assert "<script" not in markup and markup.count("</svg>") == 1
        ElementTree.fromstring(markup)


def test_colours_stay_with_their_series() -> None:
    series = [Series("training", []), Series("validation", [(1, 2), (2, 3)])]
    assert 'class="line c1"' in charts.line_chart(series, title="t", x=X, y=Y)


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


def labelled(markup: str, anchor: str) -> dict[str, tuple[float, float]]:
    """Where the texts with this anchor stand."""
    texts = [element.attrib | {"is": element.text or ""} for element in ElementTree.fromstring(markup).iter("text")]
    return {one["is"]: (float(one["x"]), float(one["y"])) for one in texts if one["text-anchor"] == anchor}


@pytest.mark.parametrize(
    ("points", "y_axis", "ticks"),
    [
        ([(0, -3.0), (5, 4.0), (10, 1.0)], Axis("nats"), {"-2": -2, "0": 0, "2": 2, "4": 4}),
        ([(-10, -0.004), (0, -0.001), (20, -0.0025)], Axis("nats"), {"-4×10⁻³": -0.004, "-2×10⁻³": -0.002}),
        ([(1, 0.2), (2, 30.0), (3, 2.0)], Axis("nats", log=True), {"1": 1, "10": 10}),
    ],
)
def test_points_stand_where_the_ticks_say(
    points: list[tuple[float, float]], y_axis: Axis, ticks: dict[str, float]
) -> None:
    """Up is more, and right is more: positions follow from two ticks of each axis, their rules and their signs."""
    markup = str(charts.line_chart([Series("a", points, dots=True)], title="t", x=X, y=y_axis))
    tree = ElementTree.fromstring(markup)
    grid = [float(rule.attrib["y1"]) for rule in tree.iter("line") if rule.attrib["class"] == "grid"]
    at = {label: y - 4 for label, (_, y) in labelled(markup, "end").items() if label in ticks}
    assert at.keys() == ticks.keys() and all(min(abs(y - rule) for rule in grid) < 0.06 for y in at.values())
    size = math.log10 if y_axis.log else float
    (low, low_y), (high, high_y) = (
        (size(ticks[label]), at[label])
        for label in (min(ticks, key=ticks.__getitem__), max(ticks, key=ticks.__getitem__))
    )
    assert high_y < low_y
    along = {float(label): x for label, (x, _) in labelled(markup, "middle").items()}
    left, right = min(along), max(along)
    assert along[left] < along[right]
    for circle, (x, y) in zip(tree.iter("circle"), sorted(points), strict=True):
        wanted_x = along[left] + (x - left) / (right - left) * (along[right] - along[left])
        wanted_y = low_y + (size(y) - low) / (high - low) * (high_y - low_y)
        assert float(circle.attrib["cx"]) == pytest.approx(wanted_x, abs=0.3)
        assert float(circle.attrib["cy"]) == pytest.approx(wanted_y, abs=0.3)


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


def test_ticks_below_zero_and_of_all_sizes() -> None:
    assert charts.linear_ticks(-7, 3) == pytest.approx([-6, -4, -2, 0, 2])
    assert charts.tick_labels([-2e6, 0, 2e6]) == ["-2M", "0", "2M"]
    assert charts.tick_labels([-0.5, -0.25]) == ["-0.50", "-0.25"]
    assert charts.figure(-3e-6) == "-3×10⁻⁶" and charts.power_label(-1e-6) == "-1×10⁻⁶"
    for low, high in ((-1.0, 1.0), (-930.0, -12.5), (0.013, 0.0172), (3.0, 8e5)):
        ticks = charts.linear_ticks(low, high, 5)
        step = ticks[1] - ticks[0]
        assert ticks == pytest.approx([ticks[0] + index * step for index in range(len(ticks))])
        assert 2 <= (high - low) / step <= 5.01 and f"{step:e}"[0] in "125"
        assert ticks[0] - step < low <= ticks[0] and ticks[-1] <= high < ticks[-1] + step


@pytest.mark.parametrize("num_ticks", [2, 3, 4, 5])
def test_there_are_two_ticks_or_more(num_ticks: int) -> None:
    for index in range(2000):
        low = 0.37 * index % 7 - 3
        high = low + 10 ** (0.003 * index - 3)
        ticks = charts.linear_ticks(low, high, num_ticks)
        assert 2 <= len(ticks) <= 2 * num_ticks + 1
        assert low <= ticks[0] + 1e-6 * (high - low) and ticks[-1] <= high + 1e-6 * (high - low)


def test_a_chart_is_described_in_words() -> None:
    markup = drawn([(1, 4.0), (2, 9.5), (3, 2.0)])
    assert "a: 4 at 1 to 2 at 3 tokens, lowest 2, highest 9.5" in ElementTree.fromstring(markup).attrib["aria-label"]


def test_an_axis_from_zero_has_nothing_below() -> None:
    assert charts.bounds([0.0, 0.0], Axis("y", from_zero=True)) == (0.0, 1.0)


def test_a_fraction_that_stays_zero_has_nothing_below() -> None:
    assert charts.bounds([0.0, 0.0], Axis("fraction of prompts")) == (0.0, 1.0)


def test_shorten_counts_chinese_as_wide() -> None:
    assert charts.shorten("abc", 100) == "abc"
    assert charts.text_width("松树") == charts.text_width("abcd")
    assert charts.text_width(charts.shorten("松树" * 30, 80)) <= 80 + charts.CHARACTER_WIDTH
