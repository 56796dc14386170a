"""Small charts as inline SVG: no script, no files, colours from CSS variables so that they follow light and dark.

Every text is escaped here, so the returned markup is safe to put into a page. Values that are None, NaN or infinite
are left out, and a chart without any point says so in words.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

LARGEST_NUMBER = 1e200  # larger values overflow when an axis is stretched
LETTER_WIDTH = 6.3  # of the 11.5 px figures on the axes
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SIZES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart. `points` are (x, y); with `dots` each point is marked (few points, e.g. validation).

    `colour` numbers the CSS colours from 0; without it a series takes its place in the chart.
    """

    name: str
    points: Sequence[tuple[float | None, float | None]]
    dots: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `log` leaves out values that are not positive; `from_zero` starts a linear axis at 0."""

    label: str
    log: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Bar:
    """A fraction with its interval, both in [0, 1]; `note` is the tooltip."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Group:
    """One label with a bar per series (None where there is none) and the chance level they share."""

    label: str
    bars: Sequence[Bar | None]
    chance: float | None = None


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to pixels in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        warp: Callable[[float], float] = math.log10 if self.log else float
        low, high = warp(self.low), warp(self.high)
        return self.start + (warp(value) - low) / (high - low) * (self.end - self.start)


def finite(value: float | None) -> bool:
    """Whether a value can be drawn."""
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST_NUMBER


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: the first, the last, and the lowest and highest of each stretch, so spikes stay."""
    if len(points) <= limit or limit < 4:
        return list(points[:limit])
    stretches = (limit - 2) // 2
    inner = len(points) - 2
    kept = [points[0]]
    for index in range(stretches):
        stretch = points[1 + inner * index // stretches : 1 + inner * (index + 1) // stretches]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}) if stretch else []
    return [*kept, points[-1]]


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) inside [low, high], about `wanted` of them."""
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Powers of ten inside [low, high], thinned over many decades, with 2 and 5 between over few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if math.log10(high) - math.log10(low) <= 2:
        ticks = [times * 10.0**power for power in range(first, last + 1) for times in (1, 2, 5)]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        return ticks if len(ticks) > 1 else linear_ticks(low, high, 3)
    every = max(1, math.ceil((last - first) / wanted))
    ticks = [10.0**power for power in range(first, last + 1, every)]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def power_label(value: float) -> str:
    """A number as a multiple of a power of ten: 5.1e14 -> '5.1×10¹⁴'."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    raised = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    return raised if mantissa == "1" else f"{mantissa}×{raised}"


def figure(value: float) -> str:
    """A number as people write it: 0.0031, 2.41, 850, 16.4k, 3×10⁻⁶. Three significant digits."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e15:
        return power_label(value)
    for unit, suffix in _SIZES:
        if size >= unit * (1 if unit > 1e3 else 9.9995):
            return f"{value / unit:.3g}{suffix}" if size < 999.5 * unit else f"{value / unit:.0f}{suffix}"
    return f"{value:.3g}" if size < 999.5 else f"{value:.0f}"


def _rounds(value: float, decimals: int, step: float) -> bool:
    """Whether so many decimals show `value` to within a hundredth of `step`."""
    return abs(round(value, decimals) - value) < 0.01 * step


def tick_labels(ticks: Sequence[float], log: bool = False) -> list[str]:
    """Labels that share one unit and one number of decimals (each its own on a log axis)."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if log or largest == 0 or len(ticks) < 2:
        return [figure(tick) for tick in ticks]
    if largest < 1e-2 or largest >= 1e15:
        power = math.floor(math.log10(largest))
        unit, suffix = 10.0**power, "×10" + str(power).translate(_SUPERSCRIPTS)
    else:
        unit, suffix = next(((unit, suffix) for unit, suffix in _SIZES if largest >= unit), (1.0, ""))
    step = min(abs(b - a) for a, b in itertools.pairwise(ticks)) / unit
    decimals = next((n for n in range(12) if all(_rounds(tick / unit, n, step) for tick in ticks)), 12)
    return [f"{tick / unit:.{decimals}f}{suffix}" if tick else "0" for tick in ticks]


def bounds(values: Iterable[float], axis: Axis) -> tuple[float, float]:
    """The ends of an axis: never equal, with a little room when all values are the same."""
    values = list(values)
    low, high = min(values), max(values)
    if axis.from_zero and not axis.log:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        if axis.log:
            return low / 2, high * 2
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    if axis.log:
        return low, high
    room = (high - low) * 0.04
    return (low if axis.from_zero and low == 0 else low - room), high + room


def text_width(text: str) -> float:
    """About how wide `text` is in pixels; Chinese characters take two places."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text) * LETTER_WIDTH


def shorten(text: str, width: float) -> str:
    """`text` on one line, cut with an ellipsis where it is wider than `width` pixels."""
    text = " ".join(text.split())
    if text_width(text) <= width:
        return text
    while text and text_width(text) > width - LETTER_WIDTH:
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


_ALONE = """
svg { --card: #ffffff; --ink: #26251f; --soft: #6b695f; --hair: #e3e0d6;
  --c0: #b9673a; --c1: #2c6e55; --c2: #4a6fa5; --c3: #8a5a83;
  font: 11.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; background: var(--card); }
@media (prefers-color-scheme: dark) { svg { --card: #1e211d; --ink: #e6e4da; --soft: #a09e92; --hair: #34372f;
  --c0: #e0955f; --c1: #74c2a0; --c2: #8fb3e6; --c3: #cf9cc6; } }
text { fill: var(--soft); } text.label, text.name { fill: var(--ink); }
.grid { stroke: var(--hair); } .base { stroke: var(--soft); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; } .hit { fill: transparent; }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); } .c3 { --own: var(--c3); }
.line { stroke: var(--own); } .fill, .dot { fill: var(--own); }
"""


def standalone(chart: Markup, *, title: str) -> Markup:
    """A chart as a file of its own: with its colours for light and dark, and its title above it.

    Without points it is empty, as the chart is.
    """
    if not chart:
        return nothing()
    head, _, body = str(chart).partition(">")
    width, height = (int(number) for number in head.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    margin, above = 10, 30
    size = f'viewBox="{-margin} {-above} {width + 2 * margin} {height + above + margin}" width="{width + 2 * margin}"'
    named = f"{_text(2, -12, title, kind='label')}"
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
        f"<style>{_ALONE}</style>{named}{body}"
    )


def nothing() -> Markup:
    """In the place of a chart without points; the page leaves it out."""
    return Markup()


def _drawable(series: Series, x: Axis, y: Axis, limit: int) -> list[Point]:
    points = [
        (float(a), float(b))
        for a, b in series.points
        if a is not None and b is not None and finite(a) and finite(b) and (a > 0 or not x.log) and (b > 0 or not y.log)
    ]
    return thin(sorted(points, key=lambda point: point[0]), limit)


def _grid(x_scale: Scale, y_scale: Scale, y_ticks: Sequence[float], y_labels: Sequence[str]) -> list[str]:
    """Horizontal rules with their figures, and upright figures below."""
    parts = []
    for tick, label in zip(y_ticks, y_labels, strict=True):
        height = y_scale.at(tick)
        parts.append(_rule(x_scale.start, height, x_scale.end, height, "grid"))
        parts.append(_text(x_scale.start - 6, height + 4, label, "end"))
    x_ticks = (log_ticks if x_scale.log else linear_ticks)(x_scale.low, x_scale.high, 4)
    base = y_scale.start
    parts.append(_rule(x_scale.start, base, x_scale.end, base, "base"))
    for tick, label in zip(x_ticks, tick_labels(x_ticks, x_scale.log), strict=True):
        place = x_scale.at(tick)
        anchor = "end" if place + text_width(label) / 2 > x_scale.end + 8 else "middle"
        parts.append(_rule(place, base, place, base + 4, "base"))
        parts.append(_text(place, base + 17, label, anchor))
    return parts


def _rect(x: float, y: float, width: float, height: float, kind: str, radius: int = 2, inner: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"'
    return f'<rect class="{kind}" {place}>{inner}</rect>'


def _legend(names: Sequence[tuple[int, str]], right: float, top: float) -> list[str]:
    """Names with their colour's number, set from the right; one name alone needs none."""
    parts: list[str] = []
    if len(names) < 2:
        return parts
    for index, name in reversed(names):
        name = shorten(name, 120)
        right -= text_width(name)
        parts += [_text(right, top, name), _rect(right - 15, top - 9, 10, 10, f"fill c{index}", 3)]
        right -= 28
    return parts


def _curve(points: Sequence[Point], series: Series, index: int, place: Callable[[Point], Point], unit: Axis) -> str:
    """One series: its line, and a tooltip on every point (drawn only where dots are wanted)."""
    spots = [(point, *place(point)) for point in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for _, a, b in spots)
    line = f'<polyline class="line c{index}" points="{path}"/>' if len(points) > 1 else ""
    kind, radius = ("dot", 3) if series.dots or len(points) == 1 else ("hit", 6)
    tips = (
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}"><title>'
        f"{escape(f'{series.name} · {figure(x)}: {figure(y)} {unit.label}')}</title></circle>"
        for (x, y), a, b in spots
    )
    return f'{line}<g class="{kind} c{index}">{"".join(tips)}</g>'


def line_chart(
    series: Sequence[Series], *, title: str, x: Axis, y: Axis, width: int = 460, height: int = 250, limit: int = 160
) -> Markup:
    """Several series over one pair of axes. `limit` bounds the points of each; units stand in the axis labels."""
    every_series = [
        (index if one.colour is None else one.colour, one, _drawable(one, x, y, limit))
        for index, one in enumerate(series)
    ]
    drawn = [(colour, one, points) for colour, one, points in every_series if points]
    if not drawn:
        return nothing()
    every = [point for _, _, points in drawn for point in points]
    y_low, y_high = bounds((point[1] for point in every), y)
    x_low, x_high = bounds((point[0] for point in every), x)
    y_ticks = (log_ticks if y.log else linear_ticks)(y_low, y_high, 5)
    y_labels = tick_labels(y_ticks, y.log)
    left = 12 + max((text_width(label) for label in y_labels), default=20)
    x_scale = Scale(x_low, x_high, left, width - 14, x.log)
    y_scale = Scale(y_low, y_high, height - 42, 34, y.log)

    def place(point: Point) -> Point:
        return x_scale.at(point[0]), y_scale.at(point[1])

    legend = _legend([(colour, one.name) for colour, one, _ in drawn], width - 14, 16)
    parts = [_text(2, 16, y.label, kind="label"), *legend]
    parts += _grid(x_scale, y_scale, y_ticks, y_labels)
    parts += [_curve(points, one, colour, place, y) for colour, one, points in drawn]
    parts.append(_text(width - 14, height - 6, x.label, "end", "label"))
    return _svg(width, height, title, parts)


def _fraction_bar(bar: Bar, index: int, scale: Scale, top: float, thick: float) -> list[str]:
    """One bar with its interval as a whisker and its value in percent behind it."""
    if not finite(bar.value) or bar.value is None:
        return []
    value = min(max(bar.value, 0.0), 1.0)
    end, middle = scale.at(value), top + thick / 2
    wide = max(end - scale.start, 1.0)
    note = f"<title>{escape(bar.note or f'{value:.1%}')}</title>"
    parts = [_rect(scale.start, top, wide, thick, f"fill c{index}", inner=note)]
    if bar.low is not None and bar.high is not None and finite(bar.low) and finite(bar.high):
        low, high = scale.at(min(max(bar.low, 0.0), 1.0)), scale.at(min(max(bar.high, 0.0), 1.0))
        parts.append(_rule(low, middle, high, middle, "whisker"))
    parts.append(_text(scale.end + 42, middle + 4, f"{value * 100:.0f} %", "end"))
    return parts


def fraction_bars(groups: Sequence[Group], names: Sequence[str], *, title: str, width: int = 460) -> Markup:
    """Horizontal bars from 0 to 100 %, a bar per name in each group, with an upright mark at the chance level."""
    groups = [group for group in groups if any(bar is not None and finite(bar.value) for bar in group.bars)]
    if not groups:
        return nothing()
    thick, gap, top = 11.0, 13.0, 34.0
    column = min(max(text_width(group.label) for group in groups) + 16, width * 0.36)
    scale = Scale(0.0, 1.0, column, width - 48)
    parts, y = _legend(list(enumerate(names)), width - 2, 16), top
    marks: list[str] = []
    for group in groups:
        tall = thick * len(group.bars)
        parts.append(_text(column - 8, y + tall / 2 + 4, shorten(group.label, column - 12), "end", "name"))
        for index, bar in enumerate(group.bars):
            parts += _fraction_bar(bar, index, scale, y + thick * index, thick - 1) if bar is not None else []
        if group.chance is not None and finite(group.chance):
            at = scale.at(min(max(group.chance, 0.0), 1.0))
            note = escape(f"guessing gets {group.chance * 100:.0f} %")
            mark = _rule(at, y - 3, at, y + tall + 2, "chance")
            marks.append(f"<g><title>{note}</title>{mark}</g>")
        y += tall + gap
    grid = [_rule(scale.at(at), top - 6, scale.at(at), y - 4, "grid") for at in (0, 0.25, 0.5, 0.75, 1)]
    feet = [_text(scale.at(at), y + 10, f"{at * 100:.0f} %", "middle") for at in (0, 0.5, 1)]
    return _svg(width, int(y + 18), title, [*grid, *parts, *marks, *feet])


def span_bar(start: float, length: float, total: float, kind: str, note: str) -> Markup:
    """A thin bar that shows where in `total` a span lies; it stretches to the width of its place."""
    if not (finite(start) and finite(length) and finite(total)) or total <= 0:
        return Markup("")
    left = min(max(start / total * 100, 0.0), 99.4)
    wide = min(max(length / total * 100, 0.6), 100 - left)
    return Markup(
        '<svg class="span" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="10"/>'
        '<rect class="{}" x="{:.2f}" width="{:.2f}" height="10"><title>{}</title></rect></svg>'
    ).format(note, kind, left, wide, note)
