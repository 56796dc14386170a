"""Plain text cut into documents: at `<|endoftext|>` where there is any, else after blank lines."""

import re
from collections.abc import Iterator
from pathlib import Path

from penjing.base.errors import UserError
from penjing.data.formats.files import encoding_hint, format_of, lines, raw_lines
from penjing.data.formats.schema import SEPARATOR
from penjing.data.formats.source_location import UnrecoverableFileError

_MARKS = r"[\u3001-\u303f\uff01-\uff60‘’“”—…]"  # of Chinese; quotation marks and dashes are those of English too
_CHINESE_INDENT = re.compile(rf"[ \t\u3000]*\u3000[ \t\u3000]*|[ \t]+(?={_MARKS}*[\u3400-\u9fff]|{_MARKS}+$)")

Line = tuple[int, str | UserError]
DOCUMENT_CHARACTERS = 2000  # approximate size of documents cut from a file without separators
LONG_LINE_BYTES = 1 << 16  # a longer line of such a file is no paragraph (DNA, base64): it becomes several documents


def plain_documents(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """(line, text); a document with a line that is not text is yielded as an error."""
    if format_of(path) == "py":
        return _whole_text(path)
    return _separated(path) if _has_separator(path) else _chunked(path)


def _whole_text(path: Path) -> Iterator[tuple[int, str | UserError]]:
    parts: list[str] = []
    for _, line in _clean_lines(path, prose=False):
        if isinstance(line, UserError):
            yield 1, line
            return
        parts.append(line)
    if any(parts):
        yield 1, "\n".join(parts) + "\n"


def _clean_lines(path: Path, *, prose: bool = True, cut_at: int = 0) -> Iterator[Line]:
    for number, line in lines(path, cut_at):
        if isinstance(line, UserError):
            yield number, line
            continue
        if "\0" in line:
            hint = encoding_hint(path) or "This is a binary file."
            yield number, UserError("a zero byte in a text file", where=f"{path}:{number}", next_step=hint)
            continue
        for part in line.split("\r") if "\r" in line else (line,):
            yield number, part.rstrip(" \t\u3000") if prose else part


def _has_separator(path: Path) -> bool:
    """Whether a line begins or ends with `<|endoftext|>`; scans bytes up to the first one, or to damage."""
    mark = SEPARATOR.encode()
    try:
        found = (raw.strip() for _, _, raw in raw_lines(path) if raw is not None and mark in raw)
        return any(line.startswith(mark) or line.endswith(mark) for line in found)
    except UserError:
        return False


class _DocumentLines:
    """The lines of the current document, and the first error among them.

    Indents of Chinese paragraphs are dropped: every full-width one; spaces and tabs before Chinese if most indented
    lines of the document begin so. All others stay, as code, verse and lists need them.
    """

    def __init__(self, start: int) -> None:
        self.start, self.lines, self.num_characters = start, list[str](), 0
        self.error: UserError | None = None
        self.num_indented, self.chinese_indents = 0, dict[int, int]()  # of a line: what is left to drop

    def add(self, line: str | UserError) -> None:
        if isinstance(line, UserError):
            self.error = line if isinstance(line, UnrecoverableFileError) else self.error or line
            return
        if line.startswith((" ", "\t", "\u3000")):
            self.num_indented += 1
            if indent := _CHINESE_INDENT.match(line):
                width = indent.end()
                if "\u3000" in indent[0]:
                    line, width = line[width:], 0
                self.chinese_indents[len(self.lines)] = width
                self.num_characters -= width
        self.lines.append(line)
        self.num_characters += len(line) + 1

    def document(self) -> tuple[int, str | UserError]:
        """(number of the first line, text) without blank lines at both ends, or the error."""
        if self.error is not None:
            return self.start, self.error
        if 2 * len(self.chinese_indents) > self.num_indented:
            for number, width in self.chinese_indents.items():
                self.lines[number] = self.lines[number][width:]
        blank = next((number for number, line in enumerate(self.lines) if line), 0)
        return self.start + blank, "\n".join(self.lines).strip("\n")

    def __bool__(self) -> bool:
        return self.error is not None or any(self.lines)


def _separated(path: Path) -> Iterator[tuple[int, str | UserError]]:
    document_lines = _DocumentLines(1)
    for number, line in _clean_lines(path):
        if isinstance(line, UserError) or SEPARATOR not in line:
            document_lines.add(line)
            continue
        *ended, begun = line.split(SEPARATOR)
        for part in ended:
            if part.strip():
                document_lines.add(part)
            yield document_lines.document()
            document_lines = _DocumentLines(number)
        if begun.strip():
            document_lines.add(begun)
        else:
            document_lines.start = number + 1
    if document_lines:
        yield document_lines.document()


def _chunked(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """Cut after a blank line once there is enough text; after any line or part of a line at 1.5 times as much."""
    document_lines = _DocumentLines(1)
    for number, line in _clean_lines(path, cut_at=LONG_LINE_BYTES):
        if not document_lines:
            if not line:
                continue
            document_lines = _DocumentLines(number)
        document_lines.add(line)
        ends_paragraph = document_lines.num_characters >= DOCUMENT_CHARACTERS and not line
        if ends_paragraph or document_lines.num_characters >= 1.5 * DOCUMENT_CHARACTERS:
            yield document_lines.document()
            document_lines = _DocumentLines(number)
    if document_lines:
        yield document_lines.document()
