"""Leave out a record that equals an earlier one."""

import hashlib
from importlib import import_module
from importlib.util import find_spec

from penjing.data.clean.rule import CorpusRule, Place, Record, RuleSettings
from penjing.data.formats.schema import Chat, Document


def content_hash(record: Record) -> bytes:
    """A 128-bit hash of what is learned from a record: its place in the files does not count."""
    if isinstance(record, Document):
        content: object = record.text
    elif isinstance(record, Chat):
        content = (record.messages, record.tools, record.reference)
    else:
        content = (record.is_chosen, [(chat.messages, chat.tools) for chat in record.chats])
    text = content if isinstance(content, str) else repr(content)
    return _hash(text.encode("utf-8", "surrogatepass"))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


if find_spec("xxhash"):  # three times as fast
    _hash = import_module("xxhash").xxh3_128_digest


class ExactDuplicates(CorpusRule):
    """Keeps the first of equal records; the table of hashes takes some 80 bytes for each."""

    reason = "equals an earlier record"
    num_keys = 1

    def __init__(self, settings: RuleSettings | None = None) -> None:
        super().__init__(settings)
        self._seen: dict[bytes, Place] = {}

    def sketch(self, record: Record) -> bytes:
        return content_hash(record)

    def first_seen(self, sketch: bytes, place: Place) -> Place | None:
        first = self._seen.setdefault(sketch, place)
        return None if first is place else first
