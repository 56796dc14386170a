"""The readers. Each goes through files in order, hands out one record at a time, and accounts for every one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.bad_records import BadRecords, NoBadRecords
from penjing.data.formats.chats import chats_of, prompt_of
from penjing.data.formats.dispatch import kind_of, record_text, rows_of, unknown_record
from penjing.data.formats.files import format_of, list_files, nothing_in
from penjing.data.formats.messages import says_nothing
from penjing.data.formats.plain_text import plain_documents
from penjing.data.formats.preferences import preference_of
from penjing.data.formats.schema import PLAIN_FORMATS, Chat, Document, Kind, PreferenceRecord
from penjing.data.formats.source_location import SourceLocation, rest_lost


class _Empty(Exception):
    """A whole record with nothing to learn from; `str` of it says why."""


def _read(
    paths: Sequence[Path],
    refused: str | None,
    make: Callable[[Any, SourceLocation], Sequence[Any]],
    bad_records: BadRecords | None,
) -> Iterator[Any]:
    """What `make` makes of each row. It raises UserError for a broken one and _Empty for one with nothing in it.

    refused: as for `_rows`. Every row is counted, and a file that gives nothing is an error.
    """
    bad_records = bad_records or NoBadRecords()
    for path in list_files(paths):
        num_before, left_out_before, first = bad_records.records, bad_records.left_out, ""
        for line, value in _rows(path, refused):
            try:
                if isinstance(value, UserError):
                    raise value
                made = make(value, SourceLocation(path, line))
            except _Empty as reason:
                first = first or f"line {line}: {reason}"
                bad_records.leave_out(path, line, str(reason))
            except UserError as error:
                bad_records.add(error, path, line)
            else:
                bad_records.good += 1
                yield from made
        num_read, num_left_out = bad_records.records - num_before, bad_records.left_out - left_out_before
        if not num_read:
            bad_records.add(nothing_in(path), path, 1)
        elif isinstance(bad_records, NoBadRecords) and num_left_out == num_read:
            raise UserError(f"no usable record: all {num_left_out} are left out, {first}", where=path)
    bad_records.check()


def _rows(path: Path, refused: str | None) -> Iterator[tuple[int, Any]]:
    """(line, text or record) of a file; that it cannot be opened, or read on, is an error as the last one.

    refused: what plain text holds where only records will do; None: its documents are read.
    """
    line = 0
    try:
        if format_of(path) not in PLAIN_FORMATS:
            rows: Iterator[tuple[int, Any]] = rows_of(path, text_only=refused is None)
        elif refused is None:
            rows = plain_documents(path)
        else:
            wanted = "jsonl, json, csv or parquet"
            rows = iter([(1, UserError(f"plain text holds {refused}", where=path, wanted=wanted))])
        for line, value in rows:
            yield line, value
    except UserError as error:
        yield line + 1, rest_lost(error)


def read_documents(paths: Sequence[Path], *, bad_records: BadRecords | None = None) -> Iterator[Document]:
    """Documents of `paths`, in order, one at a time.

    Plain text: BOM dropped, CRLF -> LF, trailing spaces and the full-width (or, before Chinese, any) indents of novels
    dropped; documents are parted by lines `<|endoftext|>` where the file has one, else the file is cut after a blank
    line, or at the latest after some line, into documents of about 2,000 characters, so that whole documents can
    be held out of a novel too. No line is ever cut and none is lost.
    A record whose text is empty is left out. A broken one is set aside in `bad_records`; without one it raises
    `UserError`.
    """

    def make(value: Any, place: SourceLocation) -> Sequence[Document]:
        text = value if isinstance(value, str) else record_text(value, place)
        if not text or text.isspace():
            raise _Empty("the text is empty")
        return [Document(text=text, source=str(place.path), line=place.line)]

    return _read(paths, None, make, bad_records)


def read_chats(paths: Sequence[Path], *, bad_records: BadRecords | None = None) -> Iterator[Chat]:
    """Chats of `paths`, in order, one at a time, whatever their shape (see the package's docstring).

    A chat in which some answer is empty is left out.
    Everything that is not a chat is set aside in `bad_records`; without one it raises `UserError`: the line, the field,
    what was got and what was wanted.
    """

    counts = bad_records or NoBadRecords()

    def make(record: Mapping[str, Any], place: SourceLocation) -> Sequence[Chat]:
        chats = list(chats_of(record, place))
        whole = [
            chat
            for chat in chats
            if not any(says_nothing(message) for message in chat.messages if message.role == "assistant")
        ]
        for _ in range(len(chats) - max(1, len(whole))):  # one more is counted below where none is whole
            counts.reasons["an answer is empty"] += 1
        if not whole:
            raise _Empty("an answer is empty")
        return whole

    return _read(paths, "documents, not chats", make, counts)


def read_prompts(
    paths: Sequence[Path], *, bad_records: BadRecords | None = None
) -> Iterator[tuple[Chat, Mapping[str, Any]]]:
    """Conversations that wait for an answer, each with its whole record (reference answers stand in further fields).

    The chat ends with a user or tool turn: an assistant's turn at its end is dropped, whatever it says. A broken record
    is set aside in `bad_records`; without one it raises `UserError`.
    """

    def make(record: Mapping[str, Any], place: SourceLocation) -> Sequence[tuple[Chat, Mapping[str, Any]]]:
        return [(prompt_of(record, place), record)]

    return _read(paths, "documents, not prompts", make, bad_records)


def read_preferences(paths: Sequence[Path], *, bad_records: BadRecords | None = None) -> Iterator[PreferenceRecord]:
    """Pairs of answers, and single answers with a label, one at a time, whatever their shape (see the package).

    A pair of equal answers, and a record with an empty answer, is left out.
    Everything else that is no preference is set aside in `bad_records`; without one it raises `UserError`: the line,
    the field, what was got and what was wanted.
    """

    def make(record: Mapping[str, Any], place: SourceLocation) -> Sequence[PreferenceRecord]:
        judged = preference_of(record, place)
        if any(says_nothing(chat.messages[-1]) for chat in judged.chats):
            raise _Empty("an answer is empty")
        if len(judged.chats) == 2 and judged.chats[0].messages == judged.chats[1].messages:
            raise _Empty("both answers are the same")
        return [judged]

    return _read(paths, "no preferences", make, bad_records)


def sniff(path: Path) -> Kind:
    """What a file (or the first file of a folder) holds, judged by its first whole record. Raises `UserError`."""
    first = list_files([path])[0]
    if format_of(first) in PLAIN_FORMATS:
        return "documents"
    broken: UserError | None = None
    for line, record in rows_of(first):
        if isinstance(record, UserError):
            broken = broken or record
            continue
        kind = kind_of(record)
        if kind is None:
            raise unknown_record(record, SourceLocation(first, line))
        return kind
    raise broken or nothing_in(first)
