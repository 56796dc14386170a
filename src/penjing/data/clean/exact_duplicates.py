"""Leave out a record that equals an earlier one."""

from __future__ import annotations

import hashlib

from penjing.data.clean.rule import Record, Rule
from penjing.data.formats.schema import Chat, Document


def content_hash(record: Record) -> bytes:
    """A 128-bit hash of what is learned from a record: its place in the files does not count."""
    if isinstance(record, Document):
        content: object = record.text
    elif isinstance(record, Chat):
        content = (record.messages, record.tools)
    else:
        content = (record.is_chosen, [(chat.messages, chat.tools) for chat in record.chats])
    text = content if isinstance(content, str) else repr(content)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ExactDuplicates(Rule):
    """Keeps the first of equal records; the table of hashes takes some 80 bytes for each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, record: Record) -> Record | str:
        key = content_hash(record)
        if key in self._seen:
            return "equals an earlier record"
        self._seen.add(key)
        return record
