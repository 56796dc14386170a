"""The interface of a cleaning rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from penjing.data.formats.schema import Chat, Document, PreferenceRecord

Record = Document | Chat | PreferenceRecord


class Rule(ABC):
    """A cleaning rule. Each pass over the records makes a new one, so it may remember what it has seen."""

    @abstractmethod
    def __call__(self, record: Record) -> Record | str:
        """The record, a changed copy of it, or the reason why it is left out."""


class TextRule(Rule):
    """A rule that changes texts. A record without any text left is left out, as if it had been read so."""

    @abstractmethod
    def text(self, text: str) -> str: ...

    def __call__(self, record: Record) -> Record:
        changed: Record = map_texts(record, self.text)
        return changed


def map_texts(record: Any, change: Callable[[str], str]) -> Any:
    """The record of any kind with every text changed: of a document; contents and thoughts of messages."""
    if isinstance(record, Document):
        return replace(record, text=change(record.text))
    if isinstance(record, PreferenceRecord):
        return replace(record, chats=tuple(map_texts(chat, change) for chat in record.chats))
    messages = (
        replace(message, content=change(message.content), reasoning_content=change(message.reasoning_content))
        for message in record.messages
    )
    return replace(record, messages=tuple(messages))


def texts_of(record: Record) -> Iterator[str]:
    """The texts of a record: that of a document; contents of messages."""
    if isinstance(record, Document):
        yield record.text
    elif isinstance(record, PreferenceRecord):
        for chat in record.chats:
            yield from texts_of(chat)
    else:
        yield from (message.content for message in record.messages)
