"""The readers. Each reads files in order, yields one record at a time, and counts every record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.bad_records import BadRecords, NoBadRecords
from penjing.data.formats.conversations import chats_of, preference_of, prompt_of, with_truth
from penjing.data.formats.dispatch import documents_of, first_record, kind_of, named_records, record_text, rows_of
from penjing.data.formats.fields import Columns, standard_record
from penjing.data.formats.files import format_of, list_files, no_record_error
from penjing.data.formats.messages import note_ignored, note_marks
from penjing.data.formats.repair import is_blank
from penjing.data.formats.schema import (
    REFERENCE_FIELDS,
    SEPARATOR,
    SWITCH_FIELDS,
    TEXT_FORMATS,
    Chat,
    Document,
    Kind,
    PreferenceRecord,
)
from penjing.data.formats.source_location import SourceLocation, unrecoverable

Clean = Callable[[Any], Any]  # a record -> the record, a changed one, or why it is left out


def _read(
    paths: Sequence[Path],
    plain_text_holds: str | None,
    parse: Callable[[Any, SourceLocation], Sequence[Any]],
    lacks: Callable[[Any], str],
    bad_records: BadRecords | None,
    clean: Clean | None,
    columns: Columns | None,
) -> Iterator[Any]:
    """The records that `parse` makes of each row; it raises UserError for a broken row.

    plain_text_holds: as for `_rows`. lacks: why there is nothing to learn from a record; empty if there is. Every row
    is counted, and a file without a record is an error.
    """
    bad_records = bad_records or NoBadRecords()
    for path in list_files(paths):
        num_before, left_out_before, first_empty = bad_records.records, bad_records.left_out, ""
        for line, value in _rows(path, plain_text_holds):
            where = SourceLocation(path, line)
            try:
                if isinstance(value, UserError):
                    raise value
                if isinstance(value, dict):
                    value = standard_record(value, columns or {}, where)
                records = parse(value, where)
                if where.unread:
                    note_ignored(where.unread, (), (), where)
            except UserError as error:
                bad_records.add(error, path, line)
                continue
            records = [lacks(record) or record for record in records]
            if clean is not None:
                records = [record if isinstance(record, str) else clean(record) for record in records]
                records = [record if isinstance(record, str) else lacks(record) or record for record in records]
            kept = [record for record in records if not isinstance(record, str)]
            left_out = [reason for reason in records if isinstance(reason, str)]
            if kept:
                bad_records.keep(where, left_out)
                yield from kept
            else:
                first_empty = first_empty or f"line {line}: {left_out[0]}"
                bad_records.leave_out(where, left_out)
        num_read, num_left_out = bad_records.records - num_before, bad_records.left_out - left_out_before
        if not num_read:
            bad_records.add(no_record_error(path), path, 1)
        elif isinstance(bad_records, NoBadRecords) and num_left_out == num_read:
            raise UserError(f"no usable record: all {num_left_out} are left out, {first_empty}", where=path)
    bad_records.check()


def _rows(path: Path, plain_text_holds: str | None) -> Iterator[tuple[int, Any]]:
    """(line, text or record) of a file; if it cannot be opened or read to the end, an error is the last item.

    plain_text_holds: the error text for plain-text files, if only records are allowed; None: read their documents.
    """
    line = 0
    try:
        if format_of(path) not in TEXT_FORMATS:
            rows: Iterator[tuple[int, Any]] = rows_of(path)
        elif plain_text_holds is None:
            rows = documents_of(path)
        else:
            wanted = "jsonl, json, csv or parquet"
            rows = iter([(1, UserError(f"a text holds {plain_text_holds}", where=path, wanted=wanted))])
        for line, value in rows:
            yield line, value
    except UserError as error:
        yield line + 1, unrecoverable(error)


def read_documents(
    paths: Sequence[Path],
    *,
    bad_records: BadRecords | None = None,
    clean: Clean | None = None,
    columns: Columns | None = None,
) -> Iterator[Document]:
    """Documents of `paths`, in order, one at a time.

    Plain text: BOM dropped, CRLF -> LF, trailing spaces and the indents of Chinese paragraphs dropped. Lines
    `<|endoftext|>` separate documents if the file has one. Otherwise the file is cut, preferably after a blank line,
    into documents of about 2,000 characters, so that a validation set can be split off a novel too. No line is lost,
    and none of less than 64 KiB is cut. `<|endoftext|>` inside a line, or in a record's text, separates documents too.
    A record with empty text is left out. A broken one goes to `bad_records`; without `bad_records` it raises UserError.
    clean: as for all readers, the cleaning rules (`data/clean`). columns: as for all readers, standard names of fields.
    """

    def parse(value: Any, where: SourceLocation) -> Sequence[Document]:
        text = value if isinstance(value, str) else record_text(value, where)
        if not isinstance(value, str):
            note_ignored(value, where.used | {name for name in SWITCH_FIELDS if value.get(name) == 1}, (text,), where)
        texts = [text]
        if SEPARATOR in text and format_of(where.path) != "py":
            texts = [part.strip("\n") for part in text.split(SEPARATOR)]
        texts = [text for text in texts if text and not text.isspace()] or [""]
        for text in texts:
            note_marks(text, where)
        return [Document(text=text, source=str(where.path), line=where.line) for text in texts]

    def lacks(document: Document) -> str:
        return "" if document.text and not document.text.isspace() else "the text is empty"

    return _read(paths, None, parse, lacks, bad_records, clean, columns)


def read_chats(
    paths: Sequence[Path],
    *,
    bad_records: BadRecords | None = None,
    clean: Clean | None = None,
    columns: Columns | None = None,
) -> Iterator[Chat]:
    """Chats of `paths`, in order, one at a time, whatever their shape (see the package's docstring).

    A chat with an empty answer is left out. A record that is not a chat goes to `bad_records`; without `bad_records` it
    raises UserError with line, field, got and wanted value.
    """

    def lacks(chat: Chat) -> str:
        answers = [message for message in chat.messages if message.role == "assistant"]
        if any(map(is_blank, answers)):
            return "an answer is empty"
        if any(message.is_target for message in answers):
            return ""
        is_asked = any(message.role == "user" for message in chat.messages)
        return "no answer has a weight above 0" if is_asked else "no question before the answer"

    return _read(paths, "documents, not chats", chats_of, lacks, bad_records, clean, columns)


def read_prompts(
    paths: Sequence[Path],
    *,
    bad_records: BadRecords | None = None,
    clean: Clean | None = None,
    columns: Columns | None = None,
) -> Iterator[Chat]:
    """Conversations that wait for an answer; their `fields` hold the full record, with reference answers.

    The chat ends with a user or tool turn; a last assistant turn is dropped, whatever its content. A broken record goes
    to `bad_records`; without `bad_records` it raises UserError.
    """

    def parse(record: Mapping[str, Any], where: SourceLocation) -> Sequence[Chat]:
        prompt = prompt_of(record, where)
        fields = with_truth({**where.unread, **record}, where)
        for name in REFERENCE_FIELDS:
            where.unread.pop(name, None)
        return [replace(prompt, fields=fields)]

    return _read(paths, "documents, not prompts", parse, lambda prompt: "", bad_records, clean, columns)


def read_preferences(
    paths: Sequence[Path],
    *,
    bad_records: BadRecords | None = None,
    clean: Clean | None = None,
    columns: Columns | None = None,
) -> Iterator[PreferenceRecord]:
    """Pairs of answers, and single answers with a label, one at a time, whatever their shape (see the package).

    A pair of equal answers, and a record with an empty answer, is left out. A record that is not a preference goes to
    `bad_records`; without `bad_records` it raises UserError with line, field, got and wanted value.
    """

    def parse(record: Mapping[str, Any], where: SourceLocation) -> Sequence[PreferenceRecord]:
        return [preference_of(record, where)]

    def lacks(preference: PreferenceRecord) -> str:
        if any(is_blank(chat.messages[-1]) for chat in preference.chats):
            return "an answer is empty"
        first, *others = (chat.messages for chat in preference.chats)
        return "both answers are the same" if first in others else ""

    return _read(paths, "no preferences", parse, lacks, bad_records, clean, columns)


READERS: dict[Kind, Callable[..., Iterator[Any]]] = {
    "documents": read_documents,
    "chats": read_chats,
    "preferences": read_preferences,
    "prompts": read_prompts,
}


def sniff(path: Path, columns: Columns | None = None) -> Kind:
    """The kind of data in a file (or the first file of a folder), from its first valid record. If that is a prompt, one
    chat record makes it chats. Raises `UserError` for an unknown kind.
    """
    first = list_files([path])[0]
    if format_of(first) in TEXT_FORMATS:
        return "documents"
    kind = kind_of(first_record(first, columns))
    assert kind is not None
    if kind != "prompts":
        return kind
    records = (record for _, record in named_records(first, columns) if not isinstance(record, UserError))
    return "chats" if any(kind_of(record) == "chats" for record in records) else kind
