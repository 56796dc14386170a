"""Tables and labelled lines for the terminal. Text from files, paths and errors is never read as markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def escape_markup(label: str, text: object, *, style: str = "yellow", indent: str = "  ", sep: str = ": ") -> Text:
    """The coloured label, then the text without markup."""
    return Text.assemble(indent, (label, style), sep, str(text))


def print_table(
    console: Console, headings: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """Print a table. `heading>` aligns its column to the right; without headings there is no heading row."""
    table = Table(box=None, pad_edge=False, show_header=bool(headings), title=title and Text(title))
    table.title_justify = "left"
    for heading in headings:
        table.add_column(Text(heading.removesuffix(">")), justify="right" if heading.endswith(">") else "left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table, highlight=False)


def silent_console(console: Console) -> Console:
    """A console that shows nothing. The consoles of ranks other than 0 are quiet already."""
    return console if console.quiet else Console(file=io.StringIO())
