"""Charts as SVG: sensible ticks, and points where the ticks say."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
from steps.standalone_chart import Scale, bounds, line_chart, linear_ticks, log_ticks, tick_labels

from penjing.report.charts import Axis, Series

X = Axis("tokens")


def test_ticks_are_round_and_inside() -> None:
    assert linear_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(1.93, 8.2, 5) == [2, 4, 6, 8]
    assert log_ticks(0.8, 30) == [1, 2, 5, 10, 20]
    assert log_ticks(1e-6, 1e6, 4) == pytest.approx([1e-6, 1e-3, 1, 1e3, 1e6])


def test_tick_labels_share_a_unit_and_differ() -> None:
    assert tick_labels([0, 5e6, 10e6, 15e6]) == ["0", "5M", "10M", "15M"]
    assert tick_labels([0.5, 0.75, 1.0]) == ["0.50", "0.75", "1.00"]
    assert tick_labels([0, 0.001, 0.002]) == ["0", "1×10⁻³", "2×10⁻³"]
    for low, high in ((1.9, 1.91), (1e-9, 3e-9), (-5, 5), (0, 123456), (1e20, 3e20)):
        labels = tick_labels(linear_ticks(low, high))
        assert len(labels) >= 2 and len(set(labels)) == len(labels)


def test_log_scale_puts_a_decade_halfway() -> None:
    assert Scale(1, 100, 0, 200, log=True).at(10) == pytest.approx(100)


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
    markup = str(line_chart([Series("a", points, dots=True)], title="t", x=X, y=y_axis))
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


def test_ticks_below_zero_and_of_all_sizes() -> None:
    assert linear_ticks(-7, 3) == pytest.approx([-6, -4, -2, 0, 2])
    assert tick_labels([-2e6, 0, 2e6]) == ["-2M", "0", "2M"]
    assert tick_labels([-0.5, -0.25]) == ["-0.50", "-0.25"]
    for low, high in ((-1.0, 1.0), (-930.0, -12.5), (0.013, 0.0172), (3.0, 8e5)):
        ticks = linear_ticks(low, high, 5)
        step = ticks[1] - ticks[0]
        assert ticks == pytest.approx([ticks[0] + index * step for index in range(len(ticks))])
        assert 2 <= (high - low) / step <= 5.01 and f"{step:e}"[0] in "125"
        assert ticks[0] - step < low <= ticks[0] and ticks[-1] <= high < ticks[-1] + step


@pytest.mark.parametrize("num_ticks", [2, 3, 4, 5])
def test_there_are_two_ticks_or_more(num_ticks: int) -> None:
    for index in range(2000):
        low = 0.37 * index % 7 - 3
        high = low + 10 ** (0.003 * index - 3)
        ticks = linear_ticks(low, high, num_ticks)
        assert 2 <= len(ticks) <= 2 * num_ticks + 1
        assert low <= ticks[0] + 1e-6 * (high - low) and ticks[-1] <= high + 1e-6 * (high - low)


def test_an_axis_from_zero_has_nothing_below() -> None:
    assert bounds([0.0, 0.0], Axis("y", from_zero=True)) == (0.0, 1.0)


def test_a_fraction_that_stays_zero_has_nothing_below() -> None:
    assert bounds([0.0, 0.0], Axis("fraction of prompts")) == (0.0, 1.0)
