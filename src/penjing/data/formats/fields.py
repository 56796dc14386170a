"""The fields of a record by their standard names: as `data.columns` says, or whatever the capitals of a name are.

A conversation may be text inside a field: JSON, a list as Python writes it, or a transcript (transcripts.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penjing.base.errors import UserError, suggest
from penjing.data.formats.loose_json import parsed_json
from penjing.data.formats.schema import CHAT_FIELDS, CHOSEN_FIELDS, KNOWN_FIELDS, REJECTED_FIELDS, STANDARD_FIELDS
from penjing.data.formats.source_location import SourceLocation, fields_of
from penjing.data.formats.transcripts import transcript_turns

Columns = Mapping[str, str]  # field of the file -> standard name
_OPTIONAL = ("system", "context", "reasoning", "tools", "choices", "history", "margin", "gt")
_MAY_BE_MESSAGES = frozenset((*CHAT_FIELDS, *CHOSEN_FIELDS, *REJECTED_FIELDS, "prompt", "history"))
_JOINED = {"text": "\n\n"}  # several fields of one name; others by a newline


def parse_columns(items: Sequence[str]) -> Columns:
    """The columns of `FIELD:NAME` items. Raises UserError for an unknown standard name."""
    columns: dict[str, str] = {}
    for item in items:
        field, _, name = item.rpartition(":")
        if field in columns:
            wanted = f"{field}:{columns[field]}"
            raise UserError("a field is named twice", where="data.columns", got=item, wanted=wanted)
        if not field or name not in STANDARD_FIELDS:
            hint = suggest(name, STANDARD_FIELDS) if field else "Write FIELD:NAME, such as body:text."
            raise UserError("not a column", where="data.columns", got=item, next_step=hint)
        columns[field] = name
    return columns


def standard_record(record: Mapping[str, Any], columns: Columns, where: SourceLocation) -> Mapping[str, Any]:
    """The record by standard names. With `columns` it has only the fields that they name."""
    named = _named(record, columns, where) if columns else _in_small_letters(record, where)
    for name in _MAY_BE_MESSAGES.intersection(named):
        value = named[name]
        if isinstance(value, str) and (messages := _messages_in(value, name)) is not None:
            named = {**named, name: messages}
    return named


def field_at(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field; `a.b` is field b of field a, if there is no field of that whole name."""
    value: Any = record
    for part in [name] if name in record else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _named(record: Mapping[str, Any], columns: Columns, where: SourceLocation) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for field, name in columns.items():
        value = field_at(record, field)
        if value is not None or field in record:
            found.setdefault(name, []).append(value)
            where.names[name] = f"{where.names[name]} + {field}" if name in where.names else field
    missing = [name for name in columns.values() if name not in found and name not in _OPTIONAL]
    if missing:
        wanted = " or ".join(field for field, name in columns.items() if name == missing[0])
        raise UserError("lacks a field of data.columns", where=where, got=fields_of(record), wanted=wanted)
    read = {*columns, *(field.split(".")[0] for field in columns if field not in record)}
    where.unread.update({name: value for name, value in record.items() if name not in read})
    return {name: _joined(name, values) for name, values in found.items()}


def _joined(name: str, values: list[Any]) -> Any:
    """Several texts as one, without the blank ones; of other values the first."""
    texts = [value for value in values if value is not None and not (isinstance(value, str) and not value.strip())]
    if len(texts) > 1 and all(isinstance(value, str) for value in texts):
        return _JOINED.get(name, "\n").join(texts)
    return (texts or values)[0]


def _in_small_letters(record: Mapping[str, Any], where: SourceLocation) -> Mapping[str, Any]:
    """The record with known names in small letters: `Text`, `Question`. Letters that name choices stay."""
    if all(name in KNOWN_FIELDS or name.islower() for name in record):
        return record
    has_letters = "A" in record and "B" in record
    renamed: dict[str, Any] = {}
    for name, value in record.items():
        small = name.strip().lower()
        is_other = small == name or small not in KNOWN_FIELDS or small in record or (has_letters and len(small) == 1)
        renamed[name if is_other else small] = value
        if not is_other:
            where.names[small] = name
    return renamed


def _messages_in(text: str, name: str) -> list[Any] | dict[str, Any] | None:
    """The messages, or pairs of a history, that a text spells; None for any other text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None if name == "history" else transcript_turns(text)
    value = parsed_json(text)
    items = value if isinstance(value, list) else [value]
    is_messages = all(isinstance(item, dict) and not {"role", "from", "human"}.isdisjoint(item) for item in items)
    if name == "history" or name in CHAT_FIELDS or (items and is_messages):
        return value if isinstance(value, (list, dict)) else None
    return None
