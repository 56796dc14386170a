"""Tables: CSV and TSV, whose columns the first row names or numbers do; parquet, arrow files and streams."""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import tee
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.files import format_of, head, lines
from penjing.data.formats.hub import is_hub, open_hub
from penjing.data.formats.source_location import NotTextError, UnrecoverableFileError, unrecoverable

Line = tuple[int, str | UserError]
Record = dict[str, Any] | UserError

_LARGEST_FIELD_CHARACTERS = 1 << 26
_LARGEST_TSV_ROW_CHARACTERS = 1 << 22  # of a row of several lines: the search for a closing quotation mark stops there
_LONGEST_NAME = 100  # characters of a column's name
_ARROW_FILE = b"ARROW1"  # the first bytes of an arrow file; a stream has none
_OPENING_QUOTE = re.compile(r'(?:^|\t)"')


def _readable(line: str | UserError) -> str:
    """A line; one that is not UTF-8 with its bad bytes replaced, since a quoted field may begin or end in it."""
    return line if isinstance(line, str) else line.readable if isinstance(line, NotTextError) else ""


def csv_records(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Record]]:
    """(line, record); a broken row is an error in its place. columns: of a file that does not name them."""
    csv.field_size_limit(_LARGEST_FIELD_CHARACTERS)  # the default of 131,072 refuses a chapter
    errors: list[UserError] = []  # of the lines of a row
    ended = False

    def csv_lines() -> Iterator[str]:
        nonlocal ended
        for _, line in lines(path):
            if isinstance(line, UserError):
                errors.append(line)
            yield _readable(line) + "\n"
        ended = True

    rows = csv.reader(csv_lines(), strict=not columns, delimiter="," if columns else _delimiter(path))
    while True:
        line = rows.line_num + 1
        errors.clear()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            hint = 'A " inside a quoted field is written "".'
            broken = UserError(f"broken CSV: {error}", where=f"{path}:{line}", next_step=hint)
            if ended or "field larger" in str(error):  # an unclosed quotation mark consumed all rows
                lost = (each for each in errors if isinstance(each, UnrecoverableFileError))
                yield line, next(lost, unrecoverable(broken))
                return
            yield line, errors[0] if errors else broken
        else:
            if errors:
                yield line, errors[0]
            elif row and (columns is not None or _holds_text(row)):
                yield line, _record(row, columns or _names(row), path, line)
            if row and columns is None:
                columns = _names(row)


def _delimiter(path: Path) -> str:
    """A comma; of a first line without one the semicolon or tab that spreadsheets write in many countries."""
    names = head(path).split(b"\n", 1)[0].decode("utf-8", "replace")
    other = (mark for mark in ";\t" if mark in names and "," not in names and not _holds_text(names.split(mark)))
    return next(other, ",")


def _holds_text(row: Sequence[str]) -> bool:
    """Whether the first row of a table is a record, as it is too long for names."""
    return max(map(len, row)) > _LONGEST_NAME


def _names(row: Sequence[str]) -> list[str]:
    if _holds_text(row):
        return [str(number) for number in range(1, len(row) + 1)]
    return _unique([name.strip() for name in row])


def _unique(names: Sequence[str]) -> list[str]:
    """The names of columns; one that is there again gets a number, as pandas gives it: `text`, `text.1`."""
    again = (names[:place].count(name) for place, name in enumerate(names))
    return [f"{name}.{count}" if count else name for name, count in zip(names, again, strict=True)]


def _record(row: Sequence[str], names: Sequence[str], path: Path, line: int) -> Record:
    if len(row) != len(names):
        return UserError("a row of another width", where=f"{path}:{line}", got=f"{len(row)} fields", wanted=len(names))
    return dict(zip(names, row, strict=True))


# --- TSV -------------------------------------------------------------------------------------------------------------


def tsv_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(line, record); a broken row is an error in its place.

    Most TSV has no quoting: a quotation mark is an ordinary character. Spreadsheets and Python's csv quote a field that
    contains a tab, a line end or a quotation mark; these quotes are removed.
    """
    csv.field_size_limit(_LARGEST_FIELD_CHARACTERS)
    (line_items,) = tee(lines(path), 1)  # a second tee of it reads ahead without consuming lines
    columns: list[str] | None = None
    for line, item in line_items:
        error, text = item if isinstance(item, UserError) else None, _readable(item)
        if not text:
            if error is not None:
                yield line, error
            continue
        row = text.split("\t")
        if _OPENING_QUOTE.search(text):
            row, later_error = _unquoted(text, line_items, len(columns) if columns else None) or (row, None)
            error = error or later_error
        if error is not None or columns is not None or _holds_text(row):
            yield line, error or _record(row, columns or _names(row), path, line)
        columns = columns or _names(row)


def _unquoted(text: str, line_items: Iterator[Line], width: int | None) -> tuple[list[str], UserError | None] | None:
    """(fields of a row with quoted fields, error of one of its later lines); None if the row has no quoted field.

    width: the number of fields; None for the first row, which is one line. A quoted field may continue over further
    lines, which are then taken from `line_items`. A complete line with a stray quotation mark must not consume the
    rows after it: therefore none of its continuation lines may be a complete row.
    """
    next_lines = tee(line_items)[1] if width is not None else iter(())
    is_complete = width is not None and text.count("\t") == width - 1
    num_taken, characters_left = 0, _LARGEST_TSV_ROW_CHARACTERS
    error: UserError | None = None

    def row_lines() -> Iterator[str]:
        nonlocal num_taken, characters_left, error
        yield text + "\n"
        for _, line in next_lines:
            if not isinstance(line, (str, NotTextError)):
                return
            error, text_line = error or (None if isinstance(line, str) else line), _readable(line)
            characters_left -= len(text_line)
            if characters_left < 0 or (is_complete and width != 1 and text_line.count("\t") + 1 == width):
                return
            num_taken += 1
            yield text_line + "\n"

    try:
        row = next(csv.reader(row_lines(), delimiter="\t", strict=True))
    except csv.Error:
        return None
    if width is not None and len(row) != width:
        return None
    for _ in range(num_taken):
        next(line_items)
    return row, error


# --- parquet and arrow -----------------------------------------------------------------------------------------------


def table_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(row, record); a broken file gives an error as the last item."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    row, suffix = 0, format_of(path)
    try:
        with ExitStack() as stack:
            if suffix == "arrow":
                source = stack.enter_context(open_hub(path) if is_hub(path) else pyarrow.memory_map(str(path)))
                is_stream = source.read(len(_ARROW_FILE)) != _ARROW_FILE  # as `datasets` writes it
                source.seek(0)
                opened = pyarrow.ipc.open_stream(source) if is_stream else pyarrow.ipc.open_file(source)
                reader = stack.enter_context(opened)
                whole = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
                batches = (batch.slice(first, 256) for batch in whole for first in range(0, batch.num_rows, 256))
            else:
                source = stack.enter_context(open_hub(path)) if is_hub(path) else path
                batches = stack.enter_context(pyarrow.parquet.ParquetFile(source)).iter_batches(batch_size=256)
            for batch in batches:
                for record in batch.rename_columns(_unique(batch.schema.names)).to_pylist():
                    row += 1
                    yield row, record
    # A damaged file may raise any of these; UnicodeDecodeError is a ValueError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        message = " ".join(str(error).split())[:200]
        broken = UserError(f"broken {suffix} file: {message}", where=path, got=f"{row} rows before it")
        yield row + 1, unrecoverable(broken)
