"""The table of all benchmarks, for terminal and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from penjing.base.markup import print_table


@dataclass(frozen=True)
class ResultTable:
    """A table of text cells. The first column is left-aligned, the others right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        return "".join(f"| {' | '.join(line)} |\n" for line in (self.headings, rule, *self.rows))

    def print(self, console: Console) -> None:
        first, *others = self.headings
        print_table(console, [first, *(f"{heading}>" for heading in others)], self.rows, title=self.title)
