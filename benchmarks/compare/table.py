"""The table of all benchmarks, for terminal and Markdown; and the median of several measurements, with their range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from penjing.base.markup import print_table

Show = Callable[[float], str]
MEBIBYTE = 2**20


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def with_range(stats: Mapping[str, float], show: Show) -> str:
    """The median, followed by the range if there is one."""
    if stats["low"] == stats["high"]:
        return show(stats["median"])
    return f"{show(stats['median'])} ({show(stats['low'])}-{show(stats['high'])})"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rule, *rows))


@dataclass(frozen=True)
class ResultTable:
    """A table of text cells. The first column is left-aligned, the others right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        return markdown_table(self.headings, self.rows)

    def print(self, console: Console) -> None:
        first, *others = self.headings
        print_table(console, [first, *(f"{heading}>" for heading in others)], self.rows, title=self.title)


def joined(tables: Mapping[str, ResultTable]) -> ResultTable:
    """One table of several: the first column names each one's table, a dash stands where a table lacks a column."""
    headings = list(dict.fromkeys(heading for table in tables.values() for heading in table.headings[1:]))
    rows = []
    for name, table in tables.items():
        for label, *cells in table.rows:
            found = dict(zip(table.headings[1:], cells, strict=True))
            rows.append([f"{name}, {label}", *[found.get(heading, "-") for heading in headings]])
    return ResultTable(["", *headings], rows)
