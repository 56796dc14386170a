"""The interface of a cleaning rule."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

from penjing.base.config import Settings
from penjing.base.errors import missing_extra
from penjing.data.formats.schema import Chat, Document, Message, PreferenceRecord

Record = Document | Chat | PreferenceRecord
Place = tuple[str, int]  # file and line of a record


class Dropped(str):
    """Why a rule leaves a record out. The text has few values and is counted; detail is of this record alone."""

    detail: str

    def __new__(cls, reason: str, detail: str = "") -> "Dropped":
        dropped = super().__new__(cls, reason)
        dropped.detail = detail
        return dropped


@dataclass(frozen=True, kw_only=True)
class RuleSettings(Settings):
    """Settings of a rule, in the module of its name; this one has none."""

    def __init_subclass__(cls) -> None:
        cls.section = f"rules.{cls.__module__.rpartition('.')[2]}"

    def files(self) -> tuple[str, ...]:
        """The files whose contents decide what the rule does."""
        return ()


class Rule(ABC):
    """A cleaning rule. Each pass over the records makes a new one, so it may remember what it has read from a file.

    A rule decides from the record alone, so records may pass it in any order and in several processes. One that
    compares records is a `CorpusRule`.
    """

    settings_type: ClassVar[type[RuleSettings]] = RuleSettings
    settings: Any
    num_keys: ClassVar[int] = 0  # above 0: it compares records
    package: ClassVar[str] = ""  # of the extra `data`, that it needs

    def __init__(self, settings: RuleSettings | None = None) -> None:
        """Raises UserError if its package is not installed."""
        if self.package and find_spec(self.package) is None:
            raise missing_extra(self.package)
        self.settings = settings or self.settings_type()

    @abstractmethod
    def __call__(self, record: Record) -> Record | str:
        """The record, a changed copy of it, or the reason why it is left out, which may be a `Dropped`."""


class CorpusRule(Rule):
    """A rule that leaves out records by what came before: a part for any process, and a part in order in one."""

    num_keys: ClassVar[int]  # records differ if none of the first num_keys words (8 bytes) of their sketches is equal

    @abstractmethod
    def sketch(self, record: Record) -> bytes:
        """What of the record the rule compares. A pure function. Empty: the record is like no other."""

    @abstractmethod
    def first_seen(self, sketch: bytes, place: Place) -> Place | None:
        """The place of the earlier record that this one repeats; None if it is new. Remembers the sketch."""

    reason: ClassVar[str] = "repeats an earlier record"

    def compare(self, sketch: bytes, place: Place) -> Dropped | None:
        """Why the record at `place` is left out; None if it is kept."""
        earlier = self.first_seen(sketch, place)
        return None if earlier is None else Dropped(self.reason, "{}:{}".format(*earlier))

    def __call__(self, record: Record) -> Record | str:
        return self.compare(self.sketch(record), place_of(record)) or record


class TextRule(Rule):
    """A rule that changes texts. A record without any text left is left out, as if it had been read so."""

    @abstractmethod
    def text(self, text: str) -> str: ...

    def __call__(self, record: Record) -> Record:
        changed: Record = map_texts(record, self.text)
        return changed


def place_of(record: Record) -> Place:
    where = record.chats[0] if isinstance(record, PreferenceRecord) else record
    return where.source, where.line


def map_texts(record: Any, change: Callable[[str], str]) -> Any:
    """The record of any kind with every text changed: of a document; contents and thoughts of messages."""
    if isinstance(record, Document):
        text = change(record.text)
        return record if text is record.text else replace(record, text=text)
    if isinstance(record, PreferenceRecord):
        return replace(record, chats=tuple(map_texts(chat, change) for chat in record.chats))
    messages = (
        replace(message, content=change(message.content), reasoning_content=change(message.reasoning_content))
        for message in record.messages
    )
    return replace(record, messages=tuple(messages))


def chats_of(record: Record) -> Sequence[Chat]:
    """The conversations of a record; none of a document."""
    if isinstance(record, Document):
        return ()
    return record.chats if isinstance(record, PreferenceRecord) else (record,)


def turns_of(record: Record) -> Iterator[Message]:
    """The messages of a record; what the answers of a preference share comes once."""
    before: Sequence[Message] = ()
    for chat in chats_of(record):
        yield from (turn for place, turn in enumerate(chat.messages) if before[place : place + 1] != (turn,))
        before = chat.messages


def texts_of(record: Record) -> Iterator[str]:
    """The texts of a record: that of a document; thoughts and contents of messages."""
    if isinstance(record, Document):
        yield record.text
    yield from (turn.text for turn in turns_of(record))
