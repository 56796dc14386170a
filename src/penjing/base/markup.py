"""The terminal: a console, tables and labelled lines. Text of models, tools, files and errors is never read as markup,
and its control characters never reach the terminal: they could set its title, write to the clipboard or hide text."""

import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# C0, DEL and C1, without tab and newline: an escape sequence begins with one of them, wherever a stream is cut.
_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"]
_SURROGATES = range(0xD800, 0xE000)  # of broken file names and JSON; they have no encoding
_PRINTABLE = {**dict.fromkeys(_CONTROLS, ""), **dict.fromkeys(_SURROGATES, "\ufffd")}


def printable(text: str) -> str:
    """The text without control characters, except tab and newline, and with U+FFFD for surrogates."""
    return text.translate(_PRINTABLE)


def open_streams() -> None:
    """Streams that the caller has closed lead nowhere. Characters that the terminal's encoding lacks are escaped."""
    sys.stdin = sys.stdin or open(os.devnull)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Terminal(Console):
    """A console that prints no control characters but rich's own, and no emoji for words between colons. What cannot be
    written, as the disk is full or the terminal was closed, is lost: the work goes on. lost: why, the last time. A pipe
    that nobody reads any longer ends the program, unless it trains."""

    lost: ClassVar[OSError | None] = None
    trains: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            Terminal.lost = error
            self._buffer.clear()

    def on_broken_pipe(self) -> None:
        if not Terminal.trains:
            super().on_broken_pipe()
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # else Python tries it again when it ends

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else segment._replace(text=printable(segment.text)) for segment in buffer
        )


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
