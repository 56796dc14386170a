"""Tables and marked lines for the terminal. The text of files, paths and errors is never markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def escape_markup(mark: str, text: object, *, style: str = "yellow", indent: str = "  ", between: str = ": ") -> Text:
    """`mark`, coloured, and the text about it, as it is."""
    return Text.assemble(indent, (mark, style), between, str(text))


def print_table(
    console: Console, headings: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    """A plain table. `heading>` aligns its column to the right; without headings there is no heading row."""
    table = Table(box=None, pad_edge=False, show_header=bool(headings), title=title and Text(title))
    table.title_justify = "left"
    for heading in headings:
        table.add_column(Text(heading.removesuffix(">")), justify="right" if heading.endswith(">") else "left")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table, highlight=False)


def silent_console(console: Console) -> Console:
    """For output that nobody is to see. On other ranks than 0 the console is quiet already, and stays so."""
    return console if console.quiet else Console(file=io.StringIO())
