"""The location of a record, and helpers for its error messages."""

from collections.abc import Container, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.formats.schema import TEXT_MARK, is_harmless


class SourceLocation:
    """A file and a line, and what its reader makes of the record there.

    used: the fields of the record that were read, and as what; empty if they are blank. ignored: fields and marks that
    change what should be learned, and that nothing uses. names: of fields in the file, if `data.columns` or their
    capitals differ. unread: fields that `data.columns` does not name. repairs: what was changed, in words.
    """

    __slots__ = ("ignored", "line", "names", "path", "repairs", "unread", "used")

    def __init__(self, path: Path, line: int) -> None:
        self.path, self.line = path, line
        self.used: dict[str, str] = {}
        self.ignored: set[str] = set()
        self.names: dict[str, str] = {}
        self.unread: dict[str, Any] = {}
        self.repairs: set[str] = set()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    def note_ignored(
        self, fields: Mapping[str, Any], used: Container[str] = (), contents: Sequence[str] = (), suffix: str = ""
    ) -> None:
        """Note the fields that nothing uses, unless they are empty, harmless, or repeat the contents."""
        for name, value in fields.items():
            if name in used or value is None or value == [] or value == {} or is_harmless(name):
                continue
            if isinstance(value, str) and (
                not value.strip() or value in contents or (contents and all(text in value for text in contents))
            ):
                continue
            self.ignored.add(f"field {name[:30].encode('utf-8', 'backslashreplace').decode()}{suffix}")

    def note_marks(self, text: str) -> None:
        """Note marks of templates that stand in a text."""
        if "<" in text or "[" in text:
            self.ignored.update(f"the mark {mark} as text" for mark in TEXT_MARK.findall(text))


class UnrecoverableFileError(UserError):
    """Damage after which the start of the next record is unknown: the rest of the file is not read."""


class NotTextError(UserError):
    """A line that is not UTF-8. readable: the line with its bad bytes replaced, for a parser that must continue."""

    readable = ""


def unrecoverable(error: UserError, where: object = None) -> UnrecoverableFileError:
    """The error as one after which the file is not read. where: a more exact location, if known."""
    return UnrecoverableFileError(
        error.what, where=where or error.where, got=error.got, wanted=error.wanted, next_step=error.next_step
    )


def present(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of `names` whose value in the record is not null."""
    return next((name for name in names if record.get(name) is not None), None)


def filled(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of `names` whose value is more than white space, else the first that the record has."""
    here = [name for name in names if name in record]
    for name in here:
        value = record[name]
        if value is not None and not (isinstance(value, str) and not value.strip()):
            return name
    return here[0] if here else None


def fields_of(record: Mapping[Any, Any]) -> str:
    """Field names for an error line: at most ten, none longer than thirty characters."""
    shown = [text if len(text) <= 30 else text[:27] + "..." for text in map(str, islice(record, 10))]
    return "the fields " + ", ".join(shown) + (", ..." if len(record) > 10 else "") if record else "no field at all"


def type_name(value: object) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def text_of(value: object, field: str, where: SourceLocation) -> str:
    """`value` as text that can be written as UTF-8; null is empty. `field` names it in the error."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"field {field} is not text", where=where, got=type_name(value), wanted="text")
    if "\0" in value:
        got = f"character {value.index(chr(0)) + 1}"
        raise UserError(f"field {field} has a zero byte", where=where, got=got, wanted="text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            got = f"\\u{ord(value[error.start]):04x} without its pair at character {error.start + 1}"
            raise UserError(f"field {field} has half a character", where=where, got=got) from None
    return value


def join_or(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return ", ".join(names[:-1]) + " or " + names[-1]
