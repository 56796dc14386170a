"""Small charts as inline SVG: no script, no files, colours from CSS variables for light and dark mode.

All text is escaped here, so the returned markup is safe to insert into a page. None, NaN and infinite values are
skipped; a chart without points is empty.

We use no library because none fits: the page must not run scripts or load anything (its text comes from files), charts
must follow light and dark mode, and screen readers need a description; docs/report.md lists the alternatives.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from rich.cells import cell_len

from penjing.base.accuracy import AccuracyLine, Score
from penjing.base.formatting import count
from penjing.base.untrusted import number
from penjing.report.metrics import thinned

CHARACTER_WIDTH = 6.3  # of the 11.5 px figures on the axes
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LIGHT_COLOURS = ("#b9673a", "#2c6e55", "#4a6fa5", "#8a5a83", "#94800f", "#2b8a9c", "#b8436c", "#5d5b52")
DARK_COLOURS = ("#e0955f", "#74c2a0", "#8fb3e6", "#cf9cc6", "#d9c45a", "#6cc7d8", "#f08fb0", "#b9b6a8")
NUM_COLOURS = len(LIGHT_COLOURS)
LIGHT, DARK = (
    " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))
    for colours in (LIGHT_COLOURS, DARK_COLOURS)
)
CSS = "\n".join(
    (
        ".grid { stroke: var(--hair); } .base { stroke: var(--soft); } .hit { fill: transparent; }",
        ".line { fill: none; stroke: var(--own); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }",
        ".dashed { stroke-dasharray: 5 4; } .fill, .dot { fill: var(--own); }",
        *(f".c{index} {{ --own: var(--c{index}); }}" for index in range(NUM_COLOURS)),
    )
)
_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))

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
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        transform: Callable[[float], float] = math.log10 if self.log else float
        low, high = transform(self.low), transform(self.high)
        return self.start + (transform(value) - low) / (high - low) * (self.end - self.start)


def linear_ticks(low: float, high: float, num_ticks: int = 5) -> list[float]:
    """About `num_ticks` round values, at least two, inside [low, high]: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / max(num_ticks, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    ticks: list[float] = []
    for step in (power * times for times in (10, 5, 2, 1, 0.5, 0.2)):
        if len(ticks) > 1 and step < rough * 0.999:
            break
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = [index * step for index in range(first, last + 1)]
    return ticks


def log_ticks(low: float, high: float, num_ticks: int = 5) -> list[float]:
    """Powers of ten inside [low, high]; over many decades not all of them, over few also 2 and 5 times each."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    few = math.log10(high) - math.log10(low) <= 2
    powers = range(first, last + 1, 1 if few else max(1, math.ceil((last - first) / num_ticks)))
    ticks = [times * 10.0**power for power in powers for times in ((1, 2, 5) if few else (1,))]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return ticks if len(ticks) > 1 or not few else linear_ticks(low, high, 3)


def power_label(value: float) -> str:
    """A number as a multiple of a power of ten: 5.1e14 -> '5.1×10¹⁴'."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
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


def _is_exact(value: float, decimals: int, step: float) -> bool:
    """Whether so many decimals represent `value` to within a hundredth of `step`."""
    return abs(round(value, decimals) - value) < 0.01 * step


def tick_labels(ticks: Sequence[float], log: bool = False) -> list[str]:
    """Labels with a common unit and number of decimals (on a log axis each is formatted separately)."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if log or largest == 0 or len(ticks) < 2:
        return [figure(tick) for tick in ticks]
    if largest < 1e-2 or largest >= 1e15:
        power = math.floor(math.log10(largest))
        unit, suffix = 10.0**power, "×10" + str(power).translate(_SUPERSCRIPTS)
    else:
        unit, suffix = next(((unit, suffix) for unit, suffix in _SIZES if largest >= unit), (1.0, ""))
    step = min(abs(b - a) for a, b in itertools.pairwise(ticks)) / unit
    decimals = next((n for n in range(12) if all(_is_exact(tick / unit, n, step) for tick in ticks)), 12)
    return [f"{tick / unit:.{decimals}f}{suffix}" if tick else "0" for tick in ticks]


def bounds(values: Iterable[float], axis: Axis) -> tuple[float, float]:
    """The limits of an axis, with a margin; never equal, even if all values are the same."""
    values = list(values)
    low, high = min(values), max(values)
    if axis.from_zero and not axis.log:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        if axis.log:
            return low / 2, high * 2
        margin = abs(high) * 0.1 or 1.0
        return (0.0, margin) if axis.from_zero or not high else (low - margin, high + margin)
    if axis.log:
        return low, high
    margin = (high - low) * 0.04
    return (low if axis.from_zero and low == 0 else low - margin), high + margin


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


def _svg(width: int, height: int, label: str, parts: Iterable[str]) -> Markup:
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(parts) + "</svg>")


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _drawable(series: Series, x: Axis, y: Axis, limit: int) -> list[Point]:
    known = [(number(a), number(b)) for a, b in series.points]
    points = [
        (a, b) for a, b in known if a is not None and b is not None and (a > 0 or not x.log) and (b > 0 or not y.log)
    ]
    points.sort(key=lambda point: point[0])
    return [points[index] for index in thinned(np.array([y for _, y in points]), limit)]


def _grid(x_scale: Scale, y_scale: Scale, y_ticks: Sequence[float], y_labels: Sequence[str]) -> list[str]:
    """Horizontal grid lines with labels, and the x axis with ticks and labels."""
    parts = []
    for tick, label in zip(y_ticks, y_labels, strict=True):
        height = y_scale.at(tick)
        parts.append(_rule(x_scale.start, height, x_scale.end, height, "grid"))
        parts.append(_text(x_scale.start - 6, height + 4, label, "end"))
    x_ticks = (log_ticks if x_scale.log else linear_ticks)(x_scale.low, x_scale.high, 4)
    base = y_scale.start
    parts.append(_rule(x_scale.start, base, x_scale.end, base, "base"))
    for tick, label in zip(x_ticks, tick_labels(x_ticks, x_scale.log), strict=True):
        x = x_scale.at(tick)
        anchor = "end" if x + text_width(label) / 2 > x_scale.end + 8 else "middle"
        parts.append(_rule(x, base, x, base + 4, "base"))
        parts.append(_text(x, base + 17, label, anchor))
    return parts


def _rect(x: float, y: float, width: float, height: float, kind: str, radius: int = 2, inner: str = "") -> str:
    geometry = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
    return f'<rect class="{kind}" {geometry}>{inner}</rect>'


def _legend(names: Sequence[tuple[int, str]], right: float, top: float) -> list[str]:
    """A right-aligned legend of (colour index, name); none for a single name."""
    parts: list[str] = []
    if len(names) < 2:
        return parts
    for index, name in reversed(names):
        name = shorten(name, 120)
        right -= text_width(name)
        parts += [_text(right, top, name), _rect(right - 15, top - 9, 10, 10, f"fill c{index}", 3)]
        right -= 28
    return parts


def _curve(points: Sequence[Point], series: Series, index: int, to_pixels: Callable[[Point], Point], unit: Axis) -> str:
    """One series: its line, and a tooltip on every point; points are visible only with `dots`."""
    pixels = [(point, *to_pixels(point)) for point in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for _, a, b in pixels)
    mark = "line dashed" if series.dashed else "line"
    line = f'<polyline class="{mark} c{index}" points="{path}"/>' if len(points) > 1 else ""
    kind, radius = ("dot", 3) if series.dots or len(points) == 1 else ("hit", 6)
    tips = (
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}"><title>'
        f"{escape(f'{series.name} · {figure(x)}: {figure(y)} {unit.label}')}</title></circle>"
        for (x, y), a, b in pixels
    )
    return f'{line}<g class="{kind} c{index}">{"".join(tips)}</g>'


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
    series: Sequence[Series],
    *,
    title: str,
    x: Axis,
    y: Axis,
    width: int = 460,
    height: int = 250,
    limit: int = 160,
    legend: bool = True,
) -> Markup:
    """Several series in one chart. `limit`: maximum points per series; axis labels include units."""
    drawable = [
        ((index if line.colour is None else line.colour) % NUM_COLOURS, line, _drawable(line, x, y, limit))
        for index, line in enumerate(series)
    ]
    plotted = [(colour, line, points) for colour, line, points in drawable if points]
    if not plotted:
        return Markup()
    all_points = [point for _, _, points in plotted for point in points]
    y_low, y_high = bounds((point[1] for point in all_points), y)
    x_low, x_high = bounds((point[0] for point in all_points), x)
    y_ticks = (log_ticks if y.log else linear_ticks)(y_low, y_high, 5)
    y_labels = tick_labels(y_ticks, y.log)
    left = 12 + max((text_width(label) for label in y_labels), default=20)
    x_scale = Scale(x_low, x_high, left, width - 14, x.log)
    y_scale = Scale(y_low, y_high, height - 42, 34, y.log)

    def to_pixels(point: Point) -> Point:
        return x_scale.at(point[0]), y_scale.at(point[1])

    parts = [_text(2, 16, y.label, kind="label")]
    named = plotted if len(plotted) < 3 else [item for item in plotted if not item[1].dashed]
    parts += _legend([(colour, line.name) for colour, line, _ in named], width - 14, 16) if legend else []
    parts += _grid(x_scale, y_scale, y_ticks, y_labels)
    parts += [_curve(points, line, colour, to_pixels, y) for colour, line, points in plotted]
    parts.append(_text(width - 14, height - 6, x.label, "end", "label"))
    return _svg(width, height, text_description(title, plotted, x), parts)


def _fraction_bar(score: Score, name: str, index: int, scale: Scale, top: float, thick: float) -> list[str]:
    """One bar, with its interval as a whisker and its value in percent to the right."""
    (low, high), middle = score.interval, top + thick / 2
    note = f"{name}: {score.correct:,} of {score.total:,} (95 % interval {low * 100:.0f} % to {high * 100:.0f} %)"
    bar_width = max(scale.at(score.fraction) - scale.start, 1.0)
    return [
        _rect(scale.start, top, bar_width, thick, f"fill c{index}", inner=f"<title>{escape(note)}</title>"),
        _rule(scale.at(low), middle, scale.at(high), middle, "whisker"),
        _text(scale.end + 42, middle + 4, f"{score.fraction * 100:.0f} %", "end"),
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
    scale = Scale(0.0, 1.0, column, width - 48)
    parts, y = _legend(list(enumerate(names)), width - 2, 16), top
    marks: list[str] = []
    for line, label in zip(lines, labels, strict=True):
        parts.append(_text(column - 8, y + thick + 4, shorten(label, column - 12), "end", "name"))
        for index, score in enumerate((line.before, line.after)):
            if score:
                parts += _fraction_bar(score, names[index], index, scale, y + thick * index, thick - 1)
        if (chance := line.best.chance) is not None:
            mark = _rule(scale.at(chance), y - 3, scale.at(chance), y + 2 * thick + 2, "chance")
            marks.append(f"<g><title>guessing gets {chance * 100:.0f} %</title>{mark}</g>")
        y += 2 * thick + gap
    grid = [_rule(scale.at(tick), top - 6, scale.at(tick), y - 4, "grid") for tick in (0, 0.25, 0.5, 0.75, 1)]
    feet = [_text(scale.at(tick), y + 10, f"{tick * 100:.0f} %", "middle") for tick in (0, 0.5, 1)]
    return _svg(width, int(y + 18), title, [*grid, *parts, *marks, *feet])


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
