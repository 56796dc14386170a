"""Tables: CSV and TSV whose first row names the columns, and parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.text.records.files import lines
from penjing.text.records.kinds import TEXT_FIELDS

_LARGEST_FIELD_CHARACTERS = 1 << 26


class _BadLine(Exception):
    """A line that is not text, met by the CSV parser."""

    def __init__(self, error: UserError) -> None:
        self.error = error
        super().__init__(error.line())


class _Feed:
    """Lines for the parser. Unlike a generator it goes on after it raised."""

    def __init__(self, path: Path) -> None:
        self._lines = lines(path)

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        _, line = next(self._lines)
        if isinstance(line, UserError):
            raise _BadLine(line)
        return line + "\n"


def csv_records(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
    """(line, record); a broken row is an error in its place."""
    csv.field_size_limit(_LARGEST_FIELD_CHARACTERS)  # the default of 131,072 refuses a chapter
    rows = csv.reader(_Feed(path), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    line = 1
    bad_lines = 0  # which the parser has not counted
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except _BadLine as error:
            bad_lines += 1
            yield line, error.error
        except csv.Error as error:
            yield (
                line,
                UserError(
                    f"broken CSV: {error}", where=f"{path}:{line}", next_step='A " inside a quoted field is written "".'
                ),
            )
        else:
            if row and names is None:
                names = [name.strip() for name in row]
            elif row and names is not None:
                if len(row) == len(names):
                    yield line, dict(zip(names, row, strict=True))
                else:
                    got = f"{len(row)} fields"
                    yield line, UserError("a row of another width", where=f"{path}:{line}", got=got, wanted=len(names))
        line = rows.line_num + bad_lines + 1


def parquet_records(path: Path, text_only: bool) -> Iterator[tuple[int, dict[str, Any] | UserError]]:
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
        said = " ".join(str(error).split())[:200]
        yield row + 1, UserError(f"broken parquet file: {said}", where=path, got=f"{row} rows before it")
