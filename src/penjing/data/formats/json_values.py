"""JSON Lines, and JSON arrays or concatenated values, decoded value by value in bounded memory."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.files import blocks, format_of, head, lines
from penjing.data.formats.loose_json import strict_json
from penjing.data.formats.source_location import type_name, unrecoverable

LARGEST_RECORD_CHARACTERS = 1 << 26
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def json_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
    """(line, record) of a JSON file; a value that is not a record is yielded as an error."""
    for line, value in _json_lines(path) if _is_json_lines(path) else JsonStream(path).values():
        if isinstance(value, str) and value.lstrip().startswith("{"):  # a record as text
            value = strict_json(value, value)
        if isinstance(value, (dict, UserError)):
            yield line, value
        else:
            got = type_name(value)
            yield line, UserError("not a record", where=f"{path}:{line}", got=got, wanted="a JSON object {...}")


def _is_json_lines(path: Path) -> bool:
    start = head(path).removeprefix(BOM_UTF8).lstrip()
    first, newline, _ = start.partition(b"\n")
    if first.startswith(b"[") or first.strip() == b"{":
        return False
    return format_of(path) == "jsonl" or (bool(newline) and isinstance(strict_json(first), dict))


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in lines(path):
        if isinstance(line, UserError):
            yield number, line
        elif line and not line.isspace():
            try:
                yield number, json.loads(line)
            except (RecursionError, ValueError) as error:
                yield number, _broken_json(f"{path}:{number}", error, line)


def _broken_json(where: str, error: Exception, text: str, column: int = 0) -> UserError:
    """The error of a text that is no JSON. column: of the error, if the text does not begin with its line."""
    if isinstance(error, json.JSONDecodeError):
        got = repr(text[error.pos : error.pos + 20]) if text[error.pos :] else "the end"
        return UserError(f"broken JSON at column {column or error.pos + 1}: {error.msg}", where=where, got=got)
    if isinstance(error, RecursionError):
        return UserError("JSON nested too deeply", where=where)
    return UserError(f"broken JSON: {error}", where=where)  # an integer of thousands of digits


class JsonStream:
    """A JSON array, or concatenated values, decoded value by value; memory holds a few blocks and one record."""

    _decoder = json.JSONDecoder()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks = blocks(path)
        self.buffer = ""
        self.position = 0  # in the buffer
        self.line = 1  # line number of the position
        self.line_start = 0  # start of that line in the buffer; negative once it is dropped

    def values(self) -> Iterator[tuple[int, Any]]:
        """(line, value). After broken JSON the start of the next value is unknown, so the error is the last item."""
        try:
            yield from self._values()
        except UserError as error:
            yield self.line, unrecoverable(error)

    def _values(self) -> Iterator[tuple[int, Any]]:
        in_array = self._next() == "["
        if in_array:
            self._move(self.position + 1)
            if self._next() == "]":
                return
        while True:
            char = self._next()
            if not char:
                if in_array:
                    raise UserError("the JSON array is never closed: the file is cut short", where=self._where())
                return
            line = self.line
            yield line, self._value()
            if in_array and not self._step_to_next_item():
                return

    def _step_to_next_item(self) -> bool:
        char = self._next()
        if char not in ("", ",", "]"):
            raise self._broken("wanted , or ]")
        if char:
            self._move(self.position + 1)
        if char == "]" and self._next():
            raise self._broken("text after the array")
        return char != "]"

    def _where(self) -> str:
        return f"{self.path}:{self.line}"

    def _broken(self, message: str, position: int | None = None) -> UserError:
        """The error at a position, else at the present one."""
        self._move(self.position if position is None else position)
        error = json.JSONDecodeError(message, self.buffer, self.position)
        return _broken_json(self._where(), error, self.buffer, self.position - self.line_start + 1)

    def _move(self, position: int) -> None:
        last = self.buffer.rfind("\n", self.position, position)
        if last >= 0:
            self.line += self.buffer.count("\n", self.position, position)
            self.line_start = last + 1
        self.position = position

    def _fill(self) -> bool:
        """Drop the decoded part of the buffer and read at least as much as remains; False at the end of the file."""
        remaining = self.buffer[self.position :]
        self.line_start -= self.position
        self.position = 0
        parts, num_new = [remaining], 0
        for block in self.blocks:
            parts.append(block)
            num_new += len(block)
            if num_new >= len(remaining):
                break
        self.buffer = "".join(parts)
        if len(remaining) > LARGEST_RECORD_CHARACTERS:
            raise UserError("a record longer than 67 million characters", where=self._where())
        return num_new > 0

    def _next(self) -> str:
        """The next character that is not white space, without consuming it; empty at the end."""
        while True:
            match = _JSON_SPACE.match(self.buffer, self.position)
            assert match is not None
            self._move(match.end())
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self.buffer, self.position)
            except json.JSONDecodeError as error:
                # 16: the longest literal or escape that a block boundary can split
                may_be_incomplete = error.msg.startswith("Unterminated string") or error.pos >= len(self.buffer) - 16
                offset = error.pos - self.position
                if not (may_be_incomplete and self._fill()):
                    raise self._broken(error.msg, self.position + offset) from None
                continue
            except (RecursionError, ValueError) as error:
                raise _broken_json(self._where(), error, "") from None
            self._move(end)
            return value
