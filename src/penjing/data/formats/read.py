"""The readers. Each reads files in order, yields one record at a time, and counts every record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats import schema
from penjing.data.formats.bad_records import BadRecords, NoBadRecords, UncheckedRecords
from penjing.data.formats.conversations import chats_of, preferences_of, prompt_of
from penjing.data.formats.dispatch import PLACEHOLDERS, first_record, kind_of, named_records, record_text, rows_of
from penjing.data.formats.fields import Columns, standard_record
from penjing.data.formats.files import format_of, list_files, no_record_error
from penjing.data.formats.pairs import with_truth
from penjing.data.formats.repair import is_blank
from penjing.data.formats.schema import Chat, Document, Kind, PreferenceRecord
from penjing.data.formats.source_location import SourceLocation, unrecoverable


def _read(
    text_holds: str,
    parse: Callable[[Any, SourceLocation], Sequence[Any]],
    lacks: Callable[[Any], str],
    paths: Sequence[Path],
    *,
    bad_records: BadRecords | None = None,
    clean: Callable[[Any], Any] | None = None,
    columns: Columns | None = None,
) -> Iterator[Any]:
    """The records of `paths`, in order, one at a time. Every row is counted. A file without a record is left out, or
    an error if there is no other.

    text_holds: why a text has no such records; empty if it has. parse: the records of a row; raises UserError for a
    broken one. lacks: why there is nothing to learn from a record; empty if there is.
    bad_records: gets broken records; without it they raise UserError. clean: the cleaning rules (`data/clean`): a
    record, a changed one, or why it is left out. columns: standard names of fields.
    """
    bad_records = bad_records or NoBadRecords()
    files = list_files(paths)
    for path in files:
        num_before, left_out_before, first_empty = bad_records.records, bad_records.left_out, ""
        for line, value in _rows(path, text_holds):
            where = SourceLocation(path, line)
            try:
                if isinstance(value, UserError):
                    raise value
                if isinstance(value, dict):
                    value = standard_record(value, columns or {}, where)
                records = parse(value, where)
                if where.unread:
                    where.note_ignored(where.unread)
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
        if not num_read and len(files) > 1 and not isinstance(bad_records, NoBadRecords):
            bad_records.leave_out(SourceLocation(path, 1), [no_record_error(path).what])
        elif not num_read:
            bad_records.add(no_record_error(path), path, 1)
        elif isinstance(bad_records, NoBadRecords) and num_left_out == num_read:
            raise UserError(f"no usable record: all {num_left_out} are left out, {first_empty}", where=path)
    bad_records.check()


def _rows(path: Path, text_holds: str) -> Iterator[tuple[int, Any]]:
    """(line, text or record) of a file; if it cannot be opened or read to the end, an error is the last item."""
    line = 0
    try:
        if text_holds and format_of(path) in schema.TEXT_FORMATS:
            yield 1, UserError(f"a text holds {text_holds}", where=path, wanted="jsonl, json, csv or parquet")
            return
        for line, value in rows_of(path):
            yield line, value
    except UserError as error:
        yield line + 1, unrecoverable(error)


# --- documents -------------------------------------------------------------------------------------------------------


def _documents_of(value: Any, where: SourceLocation) -> Sequence[Document]:
    """The documents of a text or record, separated by `<|endoftext|>`."""
    text = value if isinstance(value, str) else record_text(value, where)
    if not isinstance(value, str) and len(value) > len(where.used):
        switches = {name for name in schema.SWITCH_FIELDS if value.get(name) == 1}
        where.note_ignored(value, switches.union(where.used), (text,))
    texts = [text]
    if schema.SEPARATOR in text and format_of(where.path) != "py":
        texts = [part.strip("\n") for part in text.split(schema.SEPARATOR)]
    texts = [text for text in texts if text and not text.isspace()] or [""]
    for text in texts:
        where.note_marks(text)
    return [Document(text=text, source=str(where.path), line=where.line) for text in texts]


# --- conversations ---------------------------------------------------------------------------------------------------


def _chat_lacks(chat: Chat) -> str:
    answers = [message for message in chat.messages if message.role == "assistant"]
    if any(map(is_blank, answers)):
        return "an answer is empty"
    if any(message.is_target for message in answers):
        return ""
    is_asked = any(message.role == "user" for message in chat.messages)
    return "no answer has a weight above 0" if is_asked else "no question before the answer"


def _prompts_of(record: Mapping[str, Any], where: SourceLocation) -> Sequence[Chat]:
    prompt = prompt_of(record, where)
    fields = with_truth({**where.unread, **record}, where)
    for name in schema.REFERENCE_FIELDS:
        where.unread.pop(name, None)
    return [replace(prompt, fields=fields)]


def _preference_lacks(preference: PreferenceRecord) -> str:
    if any(is_blank(chat.messages[-1]) for chat in preference.chats):
        return "an answer is empty"
    first, *others = (chat.messages for chat in preference.chats)
    return "both answers are the same" if first in others else ""


read_documents = partial(
    _read, "", _documents_of, lambda document: "" if document.text.strip() else "the text is empty"
)
"""Plain text: BOM dropped, CRLF -> LF, trailing spaces and the indents of Chinese paragraphs dropped. Lines
`<|endoftext|>` separate documents if the file has one. Otherwise the file is cut, preferably after a blank line, into
documents of about 2,000 characters, so that a validation set can be split off a novel too. No line is lost; one of
64 KiB or more is cut, preferably after a sentence. `<|endoftext|>` inside a line, or in a record's text, separates
documents too."""

read_chats = partial(_read, "documents, not chats", chats_of, _chat_lacks)

read_prompts = partial(_read, "documents, not prompts", _prompts_of, lambda prompt: "")
"""Conversations that wait for an answer; a last assistant turn is dropped, whatever its content. Their `fields` hold
the full record, with reference answers."""

read_preferences = partial(_read, "no preferences", preferences_of, _preference_lacks)

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
    if format_of(first) in schema.TEXT_FORMATS:
        return "documents"
    kind = kind_of(first_record(first, columns))
    assert kind is not None
    if kind != "prompts":
        return kind
    records = (record for _, record in named_records(first, columns) if not isinstance(record, UserError))
    return "chats" if any(kind_of(record) == "chats" for record in records) else kind


def refuse_placeholders(path: Path, columns: Columns | None = None) -> None:
    """Raises UserError if the chats that a file begins with all end with a placeholder: it would be learned."""
    chats = islice(read_chats([path], bad_records=UncheckedRecords(), columns=columns), 1000)
    answers = (chat.messages[-1].content for chat in chats)
    if (first := next(answers, "")) in PLACEHOLDERS and all(answer in PLACEHOLDERS for answer in answers):
        hint = "Use it for GRPO: penjing train grpo."
        raise UserError("prompts, not chats", where=path, got=f"the answer {first}", wanted="answers", next_step=hint)


def files_by_kind(files: Sequence[Path], columns: Columns | None = None) -> dict[Kind, list[Path]]:
    """The files of each kind of records; one of which no record can be read goes with the others."""
    found: dict[Kind, list[Path]] = {}
    unknown: list[Path] = []
    first_error: UserError | None = None
    for path in list_files(files):
        try:
            found.setdefault(sniff(path, columns), []).append(path)
        except UserError as error:
            unknown.append(path)
            first_error = first_error or error
    if not found:
        raise first_error or UserError("no data", where="FILES")
    most = max(found, key=lambda kind: len(found[kind]))
    if len(found) == 1:  # as they were named: a folder is one source in the report
        return {most: list(files)}
    found[most] += unknown
    return found
