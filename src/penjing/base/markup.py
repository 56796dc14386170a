"""Lines for the terminal with a coloured mark, in which what a file, a path or an error says is never markup."""

from __future__ import annotations

from rich.text import Text


def marked(mark: str, said: object, *, style: str = "yellow", indent: str = "  ", between: str = ": ") -> Text:
    """`mark`, coloured, and what is said about it, as it is."""
    return Text.assemble(indent, (mark, style), between, str(said))
