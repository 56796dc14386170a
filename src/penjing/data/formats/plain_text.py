"""Plain text cut into documents: after lines `<|endoftext|>` where there are any, else after blank lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from penjing.base.errors import UserError
from penjing.data.formats.files import encoding_hint, format_of, lines, raw_lines
from penjing.data.formats.schema import SEPARATOR
from penjing.data.formats.source_location import UnrecoverableFileError

_INDENT = re.compile(r"[ \t\u3000]*\u3000[ \t\u3000]*|[ \t]+(?=[\u3001-\u303f\u3400-\u9fff\uff01-\uff60‘’“”—…])")

Line = tuple[int, str | UserError]
DOCUMENT_CHARACTERS = 2000  # of a document that a file without separators is cut into, about


def plain_documents(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """(line, text); a document with a line that is not text is an error in its place."""
    if format_of(path) == "py":
        return _whole_text(path)
    return _separated(path) if _has_separator(path) else _cut(path)


def _whole_text(path: Path) -> Iterator[tuple[int, str | UserError]]:
    parts: list[str] = []
    for _, line in _clean_lines(path, prose=False):
        if isinstance(line, UserError):
            yield 1, line
            return
        parts.append(line)
    if any(parts):
        yield 1, "\n".join(parts) + "\n"


def _clean_lines(path: Path, *, prose: bool = True) -> Iterator[Line]:
    for number, line in lines(path):
        if isinstance(line, UserError):
            yield number, line
            continue
        if "\0" in line:
            hint = encoding_hint(path) or "This is a binary file."
            yield number, UserError("a zero byte in a text file", where=f"{path}:{number}", next_step=hint)
            continue
        for part in line.split("\r") if "\r" in line else (line,):
            if prose:
                part = part.rstrip(" \t\u3000")
                if part and part[0] in " \t\u3000":
                    part = _INDENT.sub("", part, count=1) if _INDENT.match(part) else part
            yield number, part


def _has_separator(path: Path) -> bool:
    """Whether some line is `<|endoftext|>` alone. A scan of bytes that stops at the first one, or at damage."""
    mark = SEPARATOR.encode()
    try:
        return any(raw is not None and mark in raw and raw.strip() == mark for _, _, raw in raw_lines(path))
    except UserError:
        return False


class _Gathered:
    """The lines of the document under way, and what is wrong with one of them."""

    def __init__(self, start: int) -> None:
        self.start, self.lines, self.num_characters = start, list[str](), 0
        self.error: UserError | None = None

    def add(self, line: str | UserError) -> None:
        if isinstance(line, UserError):
            self.error = line if isinstance(line, UnrecoverableFileError) else self.error or line
        else:
            self.lines.append(line)
            self.num_characters += len(line) + 1

    def document(self) -> tuple[int, str | UserError]:
        """The lines without the blank ones at both ends, and the number of the first that is left."""
        if self.error is not None:
            return self.start, self.error
        blank = 0
        while blank < len(self.lines) and not self.lines[blank]:
            blank += 1
        return (self.start + blank if blank < len(self.lines) else self.start), "\n".join(self.lines).strip("\n")

    def __bool__(self) -> bool:
        return self.error is not None or any(self.lines)


def _separated(path: Path) -> Iterator[tuple[int, str | UserError]]:
    gathered = _Gathered(1)
    for number, line in _clean_lines(path):
        if isinstance(line, str) and line.strip() == SEPARATOR:
            yield gathered.document()
            gathered = _Gathered(number + 1)
        else:
            gathered.add(line)
    if gathered:
        yield gathered.document()


def _cut(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """After a blank line once there is enough text; after any line once there is half as much again."""
    gathered = _Gathered(1)
    for number, line in _clean_lines(path):
        if not gathered:
            if not line:
                continue
            gathered = _Gathered(number)
        gathered.add(line)
        enough = gathered.num_characters >= DOCUMENT_CHARACTERS and not line
        if enough or gathered.num_characters >= 1.5 * DOCUMENT_CHARACTERS:
            yield gathered.document()
            gathered = _Gathered(number)
    if gathered:
        yield gathered.document()
