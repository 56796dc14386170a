"""Select the reader by the file name, and detect the kind of a record."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats import schema
from penjing.data.formats.csv_parquet import csv_records, table_records, tsv_records
from penjing.data.formats.epub import epub_documents
from penjing.data.formats.fields import Columns, standard_record
from penjing.data.formats.files import format_of, no_record_error
from penjing.data.formats.html import html_documents
from penjing.data.formats.json_values import json_records
from penjing.data.formats.pairs import answer_field, chat_field, question_field
from penjing.data.formats.plain_text import plain_documents
from penjing.data.formats.schema import Kind
from penjing.data.formats.source_location import SourceLocation, fields_of, present, text_of, type_name
from penjing.data.formats.warc import warc_documents

_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    "html": html_documents,
    "warc": warc_documents,
    "epub": epub_documents,
    "txt": plain_documents,
    "md": plain_documents,
    "py": plain_documents,
    "csv": csv_records,
    "tsv": tsv_records,
    "parquet": table_records,
    "arrow": table_records,
    "jsonl": json_records,
    "json": json_records,
}
PLACEHOLDERS = ("空", "无")  # what MiniMind's prompts have in the place of an answer
_MAX_UNKNOWN = 1000  # records, the first of a file, that may be of no known kind


def rows_of(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, text or record) of a file; a broken one is yielded as an error.

    Raises UserError if the file cannot be opened at all.
    """
    return _READERS[format_of(path)](path)


def named_records(
    path: Path, columns: Columns | None = None
) -> Iterator[tuple[SourceLocation, Mapping[str, Any] | UserError]]:
    """The records of a file by standard names; a broken one is yielded as an error."""
    for line, record in rows_of(path):
        where = SourceLocation(path, line)
        try:
            yield where, record if isinstance(record, UserError) else standard_record(record, columns or {}, where)
        except UserError as error:
            yield where, error


def first_record(path: Path, columns: Columns | None = None) -> Mapping[str, Any]:
    """The first record of a known kind in a file, by standard names. Raises UserError if there is none."""
    first_error: UserError | None = None
    for where, record in islice(named_records(path, columns), _MAX_UNKNOWN):
        if not isinstance(record, UserError) and kind_of(record) is not None:
            return record
        first_error = first_error or (record if isinstance(record, UserError) else unknown_record(record, where))
    raise first_error or no_record_error(path)


def record_text(record: Mapping[str, Any], where: SourceLocation) -> str:
    """The text of a document record. Raises UserError if it has none."""
    name = next((name for name in schema.TEXT_FIELDS if name in record), None)
    if name is None or (name == "content" and "role" in record):
        kind = kind_of(record)
        hint = None if kind in (None, "documents") else f"This looks like {kind}, not documents: data.format={kind}."
        wanted = " or ".join(schema.TEXT_FIELDS)
        raise UserError("no field text", where=where, got=fields_of(record), wanted=wanted, next_step=hint)
    where.used[name] = "text"
    value = record[name]
    if isinstance(value, list) and all(isinstance(line, str) for line in value):  # lines of a poem
        value = "\n".join(value)
    return text_of(value, where.names.get(name, name), where)


def kind_of(record: Mapping[str, Any]) -> Kind | None:
    """The kind of data of a record; None if unknown."""
    if (present(record, schema.CHOSEN_FIELDS) and present(record, schema.REJECTED_FIELDS)) or _is_preference(record):
        return "preferences"
    field = chat_field(record)
    turns = record[field] if field else None
    if isinstance(turns, list) and turns:
        return "prompts" if "gt" in record or _ends_unanswered(turns[-1]) else "chats"
    if present(record, ("instruction", "en_instruction", "zh_instruction")):
        return "chats"
    has_text = _has_text(record)
    if name := question_field(record):
        answer = answer_field(record)
        if answer is not None and (not has_text or name in schema.QUESTION_FIELDS[:2] or _is_text(record[answer])):
            return "chats"
        return "documents" if has_text else "prompts"
    return "documents" if has_text else None


def _has_text(record: Mapping[str, Any]) -> bool:
    return any(_is_text(record.get(name)) for name in schema.TEXT_FIELDS)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], str))


def _is_preference(record: Mapping[str, Any]) -> bool:
    """Whether a record is an answer with a label: as plain chat data a bad answer would be learned."""
    if not any(str(record.get(name)).lower() in ("true", "false") for name in schema.LABEL_FIELDS):
        return False
    if record.get(chat_field(record) or ""):
        return True
    return answer_field(record) is not None and (question_field(record) is not None or not _has_text(record))


def _ends_unanswered(last: object) -> bool:
    if not isinstance(last, dict):
        return False
    role = last.get("role") or last.get("from")
    if role is None:
        return not last.get("assistant")
    content = last.get("content") or last.get("value") or last.get("tool_calls")
    is_answer = bool(content) and content not in PLACEHOLDERS
    return schema.ROLES.get(str(role).lower()) != "assistant" or not is_answer


def unknown_record(record: Mapping[str, Any], where: SourceLocation) -> UserError:
    wanted = "text, conversations, messages, instruction + output, or prompt + response"
    hint = "Name the fields: data.columns=FIELD:text, or FIELD:question,FIELD:answer."
    inner = next((name for name in schema.TEXT_FIELDS if record.get(name) is not None), None)
    if inner is not None and not isinstance(record[inner], dict):
        return UserError(f"field {inner} is not text", where=where, got=type_name(record[inner]), wanted="text")
    if inner is not None:
        hint = f"Name its fields: data.columns={inner}.FIELD:text, or {inner}.FIELD:question,{inner}.FIELD:answer."
        return UserError(f"field {inner} is an object", where=where, got=fields_of(record[inner]), next_step=hint)
    return UserError("not a known kind of record", where=where, got=fields_of(record), wanted=wanted, next_step=hint)
