"""Charts of a report: curves, which `curves.js` draws with uPlot in the browser, and bars as inline SVG.

All text is escaped here, so the returned markup is safe to insert into a page; scripts of a text cannot run, as the
page's policy allows `SCRIPT` alone, by its hash. None, NaN and infinite values are skipped; a chart without points is
empty. Colours are CSS variables, for light and dark mode, and screen readers get a description in words.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape
from rich.cells import cell_len

from penjing.base.accuracy import AccuracyLine, Score
from penjing.base.formatting import count
from penjing.base.untrusted import number
from penjing.report.metrics import thinned

CHARACTER_WIDTH = 6.3  # of the 11.5 px figures on the axes
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LIGHT_COLOURS = ("#b9673a", "#2c6e55", "#4a6fa5", "#8a5a83", "#94800f", "#2b8a9c", "#b8436c", "#5d5b52")
DARK_COLOURS = ("#e0955f", "#74c2a0", "#8fb3e6", "#cf9cc6", "#d9c45a", "#6cc7d8", "#f08fb0", "#b9b6a8")
NUM_COLOURS = len(LIGHT_COLOURS)
LIGHT, DARK = (
    " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))
    for colours in (LIGHT_COLOURS, DARK_COLOURS)
)
_HERE = Path(__file__).parent
CSS = "\n".join(
    (
        (_HERE / "vendor" / "uplot.css").read_text(encoding="utf-8"),
        ".grid { stroke: var(--hair); } .fill { fill: var(--own); }",
        *(f".c{index} {{ --own: var(--c{index}); }}" for index in range(NUM_COLOURS)),
    )
)
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


@dataclass(frozen=True)
class Scale:
    """Where the bars of 0 and of 100 % end, in pixels."""

    start: float
    end: float

    def at(self, fraction: float) -> float:
        return self.start + fraction * (self.end - self.start)


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


def text_width(text: str) -> float:
    """Approximate width of `text` in pixels; Chinese characters count as two."""
    return cell_len(text) * CHARACTER_WIDTH


def shorten(text: str, width: float) -> str:
    """`text` on one line, truncated with an ellipsis if it is wider than `width` pixels."""
    text = " ".join(text.split())
    if text_width(text) <= width:
        return text
    while text and text_width(text) > width - CHARACTER_WIDTH:
        text = text[:-1]
    return text.rstrip() + "…"


def svg(width: int, height: int, label: str, parts: Iterable[str]) -> Markup:
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(parts) + "</svg>")


def svg_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(text)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def drawn(series: Sequence[Series], x: Axis, y: Axis, limit: int) -> list[tuple[int, Series, list[Point]]]:
    """The colour and the points, in order, of each series that has points on these axes; `limit`: about how many."""
    found = []
    for index, line in enumerate(series):
        pairs = ((number(a), number(b)) for a, b in line.points)
        points = sorted(
            (
                (a, b)
                for a, b in pairs
                if a is not None and b is not None and (a > 0 or not x.log) and (b > 0 or not y.log)
            ),
            key=lambda point: point[0],
        )
        if points:
            kept = thinned(np.array([b for _, b in points]), limit)
            colour = index if line.colour is None else line.colour
            found.append((colour % NUM_COLOURS, line, [points[place] for place in kept]))
    return found


def rect(x: float, y: float, width: float, height: float, kind: str, radius: int = 2, inner: str = "") -> str:
    geometry = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
    return f'<rect class="{kind}" {geometry}>{inner}</rect>'


def legend(names: Sequence[tuple[int, str]], right: float, top: float) -> list[str]:
    """A right-aligned legend of (colour index, name)."""
    parts: list[str] = []
    for index, name in reversed(names):
        name = shorten(name, 120)
        right -= text_width(name)
        parts += [svg_text(right, top, name), rect(right - 15, top - 9, 10, 10, f"fill c{index}", 3)]
        right -= 28
    return parts


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


def _fraction_bar(score: Score, name: str, index: int, scale: Scale, top: float, thick: float) -> list[str]:
    """One bar, with its interval as a whisker and its value in percent to the right."""
    (low, high), middle = score.interval, top + thick / 2
    note = f"{name}: {score.correct:,} of {score.total:,} (95 % interval {low * 100:.0f} % to {high * 100:.0f} %)"
    bar_width = max(scale.at(score.fraction) - scale.start, 1.0)
    return [
        rect(scale.start, top, bar_width, thick, f"fill c{index}", inner=f"<title>{escape(note)}</title>"),
        rule(scale.at(low), middle, scale.at(high), middle, "whisker"),
        svg_text(scale.end + 42, middle + 4, f"{score.fraction * 100:.0f} %", "end"),
    ]


def fraction_bars(
    lines: Sequence[AccuracyLine], labels: Sequence[str], names: tuple[str, str], *, title: str, width: int = 460
) -> Markup:
    """Accuracy: two horizontal bars from 0 to 100 % per line, before and after (`names`), and a vertical mark at the
    chance level."""
    if not lines:
        return Markup()
    thick, gap, top = 11.0, 13.0, 34.0
    column = min(max(map(text_width, labels)) + 16, width * 0.36)
    scale = Scale(column, width - 48)
    parts, y = legend(list(enumerate(names)), width - 2, 16), top
    marks: list[str] = []
    for line, label in zip(lines, labels, strict=True):
        parts.append(svg_text(column - 8, y + thick + 4, shorten(label, column - 12), "end", "name"))
        for index, score in enumerate((line.before, line.after)):
            if score:
                parts += _fraction_bar(score, names[index], index, scale, y + thick * index, thick - 1)
        if (chance := line.best.chance) is not None:
            mark = rule(scale.at(chance), y - 3, scale.at(chance), y + 2 * thick + 2, "chance")
            marks.append(f"<g><title>guessing gets {chance * 100:.0f} %</title>{mark}</g>")
        y += 2 * thick + gap
    grid = [rule(scale.at(tick), top - 6, scale.at(tick), y - 4, "grid") for tick in (0, 0.25, 0.5, 0.75, 1)]
    feet = [svg_text(scale.at(tick), y + 10, f"{tick * 100:.0f} %", "middle") for tick in (0, 0.5, 1)]
    return svg(width, int(y + 18), title, [*grid, *parts, *marks, *feet])


def span_bar(start: float, length: float, total: float, kind: str, note: str) -> Markup:
    """A thin bar that shows the position of a span within `total`; it stretches to the width of its container."""
    if total <= 0:
        return Markup("")
    left = min(max(start / total * 100, 0.0), 99.4)
    bar_width = min(max(length / total * 100, 0.6), 100 - left)
    return Markup(
        '<svg class="span" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="10"/>'
        '<rect class="{}" x="{:.2f}" width="{:.2f}" height="10"><title>{}</title></rect></svg>'
    ).format(note, kind, left, bar_width, note)
