"""Charts of a report: curves, which `curves.js` draws with uPlot in the browser.

All text is escaped here, so the returned markup is safe to insert into a page; scripts of a text cannot run, as the
page's policy allows `SCRIPT` alone, by its hash. None, NaN and infinite values are skipped; a chart without points is
empty. Colours are CSS variables, for light and dark mode, and screen readers get a description in words.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from penjing.base.formatting import count
from penjing.base.untrusted import number
from penjing.report.metrics import thinned

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LIGHT_COLOURS = ("#b9673a", "#2c6e55", "#4a6fa5", "#8a5a83", "#94800f", "#2b8a9c", "#b8436c", "#5d5b52")
DARK_COLOURS = ("#e0955f", "#74c2a0", "#8fb3e6", "#cf9cc6", "#d9c45a", "#6cc7d8", "#f08fb0", "#b9b6a8")
NUM_COLOURS = len(LIGHT_COLOURS)
LIGHT, DARK = (
    " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))
    for colours in (LIGHT_COLOURS, DARK_COLOURS)
)
_HERE = Path(__file__).parent
CSS = (_HERE / "vendor" / "uplot.css").read_text(encoding="utf-8")
SCRIPT = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("vendor/uplot.js", "curves.js"))
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# Of the page, whose texts may be hostile: no other script runs, and nothing is loaded.
POLICY = f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; img-src data:"

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart. `points` are (x, y); `dots` marks each point (few points, e.g. validation). `colour` is an
    index into the CSS colours, by default the index of the series. `dashed` draws a dashed line."""

    name: str
    points: Sequence[tuple[float | None, float | None]]
    dots: bool = False
    colour: int | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis. `log` skips values that are not positive; `from_zero` starts a linear axis at 0."""

    label: str
    log: bool = False
    from_zero: bool = False


def power_label(value: float) -> str:
    """A number as a multiple of a power of ten: 5.1e14 -> '5.1×10¹⁴'."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    return power if mantissa == "1" else f"{mantissa}×{power}"


def figure(value: float) -> str:
    """A number with three significant digits: 0.0031, 2.41, 850, 16.4k, 3×10⁻⁶."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e15:
        return power_label(value)
    if size >= 9999.5:
        return count(value)
    return f"{value:.3g}" if size < 999.5 else f"{value:.0f}"


def drawn(series: Sequence[Series], x: Axis, y: Axis, limit: int) -> list[tuple[int, Series, list[Point]]]:
    """The colour and the points, in order, of each series that has points on these axes; `limit`: about how many."""
    found = []
    left, bottom = (0.0 if axis.log else -math.inf for axis in (x, y))
    for index, line in enumerate(series):
        pairs = ((number(a), number(b)) for a, b in line.points)
        inside = ((a, b) for a, b in pairs if a is not None and b is not None and a > left and b > bottom)
        points = sorted(inside, key=lambda point: point[0])
        if points:
            kept = thinned(np.array([b for _, b in points]), limit)
            colour = index if line.colour is None else line.colour
            found.append((colour % NUM_COLOURS, line, [points[place] for place in kept]))
    return found


def text_description(title: str, plotted: Sequence[tuple[int, Series, Sequence[Point]]], x: Axis) -> str:
    """A description of a chart for screen readers: first, last, lowest and highest value of each series."""
    parts = []
    for _, series, points in plotted:
        low, high = (figure(pick(value for _, value in points)) for pick in (min, max))
        (first, start), (last, end) = points[0], points[-1]
        span = f"{figure(start)} at {figure(first)} to {figure(end)} at {figure(last)} {x.label}"
        parts.append(f"{series.name}: {span}, lowest {low}, highest {high}")
    return f"{title}. {'; '.join(parts)}."


def line_chart(
    series: Sequence[Series], *, title: str, x: Axis, y: Axis, height: int = 250, limit: int = 160
) -> Markup:
    """Several series in one chart, which `curves.js` draws: a `div` with the points as JSON, and their description in
    words. `limit`: maximum points per series; axis labels include units; height in CSS pixels."""
    plotted = drawn(series, x, y, limit)
    if not plotted:
        return Markup()
    lines = [
        {
            "name": line.name,
            "colour": colour,
            "dots": line.dots,
            "dashed": line.dashed,
            "x": [float(f"{point[0]:.7g}") for point in points],
            "y": [float(f"{point[1]:.5g}") for point in points],
        }
        for colour, line, points in plotted
    ]
    chart = {"x": x.label, "y": y.label, "log_x": x.log, "log_y": y.log, "from_zero": y.from_zero and not y.log}
    data = json.dumps({**chart, "height": height, "series": lines}, ensure_ascii=False, separators=(",", ":"))
    label = text_description(title, plotted, x)
    return Markup('<div class="plot" role="img" aria-label="{}" data-chart="{}"></div>').format(label, data)
