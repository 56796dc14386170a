"""Line charts as SVG files for pages that run no script, such as docs/methods; reports draw theirs with uPlot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from rich.cells import cell_len

from penjing.report.charts import (
    DARK,
    LIGHT,
    NUM_COLOURS,
    SUPERSCRIPTS,
    Axis,
    Point,
    Series,
    drawn,
    figure,
    text_description,
)

CHARACTER_WIDTH = 6.3  # of the 11.5 px figures on the axes
_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
CSS = "\n".join(
    (
        ".grid { stroke: var(--hair); } .base { stroke: var(--soft); } .hit { fill: transparent; }",
        ".line { fill: none; stroke: var(--own); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }",
        ".dashed { stroke-dasharray: 5 4; } .fill, .dot { fill: var(--own); }",
        *(f".c{index} {{ --own: var(--c{index}); }}" for index in range(NUM_COLOURS)),
    )
)


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
        unit, suffix = 10.0**power, "×10" + str(power).translate(SUPERSCRIPTS)
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


def svg(width: int, height: int, label: str, parts: Iterable[str]) -> Markup:
    head = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + "".join(parts) + "</svg>")


def svg_text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(text)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


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


def _grid(x_scale: Scale, y_scale: Scale, y_ticks: Sequence[float], y_labels: Sequence[str]) -> list[str]:
    """Horizontal grid lines with labels, and the x axis with ticks and labels."""
    parts = []
    for tick, label in zip(y_ticks, y_labels, strict=True):
        height = y_scale.at(tick)
        parts.append(rule(x_scale.start, height, x_scale.end, height, "grid"))
        parts.append(svg_text(x_scale.start - 6, height + 4, label, "end"))
    x_ticks = (log_ticks if x_scale.log else linear_ticks)(x_scale.low, x_scale.high, 4)
    base = y_scale.start
    parts.append(rule(x_scale.start, base, x_scale.end, base, "base"))
    for tick, label in zip(x_ticks, tick_labels(x_ticks, x_scale.log), strict=True):
        x = x_scale.at(tick)
        anchor = "end" if x + text_width(label) / 2 > x_scale.end + 8 else "middle"
        parts.append(rule(x, base, x, base + 4, "base"))
        parts.append(svg_text(x, base + 17, label, anchor))
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


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis,
    y: Axis,
    width: int = 460,
    height: int = 250,
    limit: int = 160,
) -> Markup:
    """Several series in one chart. `limit`: maximum points per series; axis labels include units."""
    plotted = drawn(series, x, y, limit)
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

    parts = [svg_text(2, 16, y.label, kind="label")]
    named = plotted if len(plotted) < 3 else [item for item in plotted if not item[1].dashed]
    parts += legend([(colour, line.name) for colour, line, _ in named], width - 14, 16) if len(named) > 1 else []
    parts += _grid(x_scale, y_scale, y_ticks, y_labels)
    parts += [_curve(points, line, colour, to_pixels, y) for colour, line, points in plotted]
    parts.append(svg_text(width - 14, height - 6, x.label, "end", "label"))
    return svg(width, height, text_description(title, plotted, x), parts)


_STANDALONE_CSS = f"""
svg {{ --card: #ffffff; --ink: #26251f; --soft: #6b695f; --hair: #e3e0d6; {LIGHT}
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; background: var(--card); }}
@media (prefers-color-scheme: dark) {{ svg {{ --card: #1e211d; --ink: #e6e4da; --soft: #a09e92; --hair: #34372f;
  {DARK} }} }}
text {{ fill: var(--soft); }} text.label, text.name {{ fill: var(--ink); }}
{CSS}
"""


def standalone(chart: Markup, *, title: str) -> Markup:
    """A chart as a standalone SVG file, with colours for light and dark mode, and a title. Empty for an empty chart."""
    if not chart:
        return Markup()
    head, _, body = str(chart).partition(">")
    width, height = (int(number) for number in head.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    margin, above = 10, 30
    size = f'viewBox="{-margin} {-above} {width + 2 * margin} {height + above + margin}" width="{width + 2 * margin}"'
    named = f'<text x="2.0" y="-12.0" text-anchor="start" class="label">{escape(title)}</text>'
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
        f"<style>{_STANDALONE_CSS}</style>{named}{body}"
    )
