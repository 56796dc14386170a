"""The one table of all benchmarks, for a terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from penjing.base.markup import print_table

Show = Callable[[float], str]
MEBIBYTE = 2**20


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def with_range(one: Mapping[str, float], show: Show) -> str:
    """The median, and the range behind it if there is one."""
    if one["low"] == one["high"]:
        return show(one["median"])
    return f"{show(one['median'])} ({show(one['low'])}-{show(one['high'])})"


@dataclass(frozen=True)
class ResultTable:
    """Cells as text. The first column is aligned left, the others right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (self.headings, rule, *self.rows))

    def print(self, console: Console) -> None:
        first, *others = self.headings
        print_table(console, [first, *(f"{heading}>" for heading in others)], self.rows, title=self.title)
