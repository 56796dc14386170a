"""Tables: CSV and TSV whose first row names the columns, and parquet."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from itertools import tee
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.files import lines
from penjing.data.formats.schema import TEXT_FIELDS
from penjing.data.formats.source_location import NotTextError, rest_lost

Line = tuple[int, str | UserError]
Record = dict[str, Any] | UserError

_LARGEST_FIELD_CHARACTERS = 1 << 26
_LARGEST_TSV_ROW_CHARACTERS = 1 << 22  # of several lines: so much is looked at for a closing quotation mark
_OPENING_QUOTE = re.compile(r'(?:^|\t)"')


class _BadLine(Exception):
    """A line that cannot be handed to the CSV parser."""

    def __init__(self, error: UserError) -> None:
        self.error = error
        super().__init__(error.line())


class _Feed:
    """Lines for the parser. Unlike a generator it goes on after it raised.

    A line that is not UTF-8 is handed over as far as it can be read, since a quoted field may begin or end in it;
    error: what is wrong with it, until `row_begins`.
    """

    def __init__(self, path: Path) -> None:
        self._lines = lines(path)
        self.error: UserError | None = None
        self.ended = False

    def row_begins(self) -> None:
        self.error = None

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        try:
            _, line = next(self._lines)
        except StopIteration:
            self.ended = True
            raise
        if isinstance(line, NotTextError):
            self.error = self.error or line
            return line.readable + "\n"
        if isinstance(line, UserError):
            raise _BadLine(line)
        return line + "\n"


def csv_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(line, record); a broken row is an error in its place."""
    csv.field_size_limit(_LARGEST_FIELD_CHARACTERS)  # the default of 131,072 refuses a chapter
    feed = _Feed(path)
    rows = csv.reader(feed, strict=True)
    names: list[str] | None = None
    line = 1
    bad_lines = 0  # which the parser has not counted
    while True:
        feed.row_begins()
        try:
            row = next(rows)
        except StopIteration:
            return
        except _BadLine as error:
            bad_lines += 1
            yield line, error.error
        except csv.Error as error:
            hint = 'A " inside a quoted field is written "".'
            broken = UserError(f"broken CSV: {error}", where=f"{path}:{line}", next_step=hint)
            if feed.ended or "field larger" in str(error):  # a quotation mark that nothing closes took all the rows
                yield line, rest_lost(broken)
                return
            yield line, feed.error or broken
        else:
            if feed.error is not None:
                yield line, feed.error
            elif row and names is not None:
                yield line, _record(row, names, path, line)
            if row and names is None:
                names = [name.strip() for name in row]
        line = rows.line_num + bad_lines + 1


def _record(row: Sequence[str], names: Sequence[str], path: Path, line: int) -> Record:
    if len(row) != len(names):
        return UserError("a row of another width", where=f"{path}:{line}", got=f"{len(row)} fields", wanted=len(names))
    return dict(zip(names, row, strict=True))


# --- TSV -------------------------------------------------------------------------------------------------------------


def tsv_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(line, record); a broken row is an error in its place.

    Most TSV has no quoting: a quotation mark is a character like any other. Spreadsheets and Python's csv put a pair of
    them around a whole field that holds a tab, a line end or another; such a pair is taken off.
    """
    csv.field_size_limit(_LARGEST_FIELD_CHARACTERS)
    (ahead,) = tee(lines(path), 1)  # another tee of it looks at lines without taking them
    names: list[str] | None = None
    for line, given in ahead:
        if isinstance(given, UserError) and not isinstance(given, NotTextError):
            yield line, given
            continue
        wrong: UserError | None = given if isinstance(given, NotTextError) else None
        text = given.readable if isinstance(given, NotTextError) else given
        if not text:
            continue
        row = text.split("\t")
        if _OPENING_QUOTE.search(text):
            unquoted = _unquoted(text, ahead, len(names) if names else None)
            if unquoted is not None:
                row, wrong = unquoted[0], wrong or unquoted[1]
        if names is None:
            names = [name.strip() for name in row]
            if wrong is not None:
                yield line, wrong
        else:
            yield line, wrong or _record(row, names, path, line)


def _unquoted(text: str, ahead: Iterator[Line], width: int | None) -> tuple[list[str], UserError | None] | None:
    """(the fields of a row with quoted ones, what is wrong with a later line of it); None if it is no such row.

    width: how many fields it must have; None for the first row, which is one line. A quoted field may go on over
    further lines, which are then taken from `ahead`. A line that has all its fields and only seems to open another
    one does not swallow the rows after it: none of the lines it goes on over may have all of theirs.
    """
    following = tee(ahead)[1] if width is not None else iter(())
    whole = width is not None and text.count("\t") == width - 1
    num_taken, left = 0, _LARGEST_TSV_ROW_CHARACTERS
    wrong: UserError | None = None

    def feed() -> Iterator[str]:
        nonlocal num_taken, left, wrong
        yield text + "\n"
        for _, line in following:
            if isinstance(line, NotTextError):
                wrong, line = wrong or line, line.readable
            if isinstance(line, UserError):
                return
            left -= len(line)
            if left < 0 or (whole and width != 1 and line.count("\t") + 1 == width):
                return
            num_taken += 1
            yield line + "\n"

    try:
        row = next(csv.reader(feed(), delimiter="\t", strict=True))
    except csv.Error:
        return None
    if width is not None and len(row) != width:
        return None
    for _ in range(num_taken):
        next(ahead)
    return row, wrong


# --- parquet ---------------------------------------------------------------------------------------------------------


def parquet_records(path: Path, text_only: bool) -> Iterator[tuple[int, Record]]:
    """(row, record), only with a field of text if `text_only`; a broken file is an error as the last one."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading parquet needs pyarrow", where=path, next_step="pip install pyarrow") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            columns = None
            if text_only:
                found = [name for name in TEXT_FIELDS if name in table.schema_arrow.names][:1]
                columns = found or list(table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    yield row, record
    # A damaged file may be reported by any of these; UnicodeDecodeError is a ValueError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        message = " ".join(str(error).split())[:200]
        broken = UserError(f"broken parquet file: {message}", where=path, got=f"{row} rows before it")
        yield row + 1, rest_lost(broken)
