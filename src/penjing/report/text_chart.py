"""A line chart of characters, for the terminal."""

from collections.abc import Iterator, Mapping, Sequence

BRAILLE = 0x2800  # a cell of 2 x 4 dots; each bit is a dot
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, from the top
LABEL_WIDTH = 7


def text_chart(curves: Sequence[Mapping[int, float]], *, width: int, height: int, ascii: bool = False) -> list[str]:
    """Curves by step over one axis, as `height` lines of `width` characters; below them the first and the last step.
    Empty without a point."""
    points = [(step, value) for curve in curves for step, value in curve.items()]
    columns = width - LABEL_WIDTH - 1
    if not points or columns < 4 or height < 2:
        return []
    first, last = min(points)[0], max(points)[0]
    low, high = _limits([value for _, value in points])
    across, down = (1, 1) if ascii else (2, 4)
    cells = [[0] * columns for _ in range(height)]
    for curve in curves:
        at = {step: round((step - first) / max(1, last - first) * (columns * across - 1)) for step in curve}
        shares = {x: (min(max(value, low), high) - low) / (high - low) for x, value in _means(curve, at).items()}
        for x, y in _line({x: round((1 - share) * (height * down - 1)) for x, share in shares.items()}):
            cells[y // down][x // across] |= 1 if ascii else DOTS[x % 2][y % 4]
    lines = []
    for number, line in enumerate(cells):
        label = f"{high:.4g}" if number == 0 else f"{low:.4g}" if number == height - 1 else ""
        drawn = "".join(("*" if ascii else chr(BRAILLE + cell)) if cell else " " for cell in line)
        lines.append(f"{label:>{LABEL_WIDTH}} {drawn}".rstrip())
    ends = f"step {first}"
    return [*lines, " " * (LABEL_WIDTH + 1) + ends + f"{last}".rjust(columns - len(ends))]


def _limits(values: list[float]) -> tuple[float, float]:
    """Lowest and highest value; the highest tenth of the values may be cut off, as a loss falls fast at first."""
    values = sorted(values)
    low, high = values[0], values[-1]
    usual = values[int(0.9 * (len(values) - 1))]
    if len(values) > 20 and high - low > 3 * (usual - low):
        high = usual
    margin = max(0.5, 1e-9 * abs(low))  # a smaller one would be lost beside a value such as 1e20
    return (low, high) if high > low else (low - margin, low + margin)


def _means(curve: Mapping[int, float], at: Mapping[int, int]) -> dict[int, float]:
    """The mean of the values in each column."""
    values: dict[int, list[float]] = {}
    for step in sorted(curve):
        values.setdefault(at[step], []).append(curve[step])
    return {column: sum(some) / len(some) for column, some in values.items()}


def _line(points: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The points by column, and what connects them."""
    before: tuple[int, int] | None = None
    for x, y in points.items():
        x0, y0 = before or (x, y)
        steps = max(x - x0, abs(y - y0), 1)
        yield from ((x0 + round((x - x0) * i / steps), y0 + round((y - y0) * i / steps)) for i in range(steps + 1))
        before = x, y
