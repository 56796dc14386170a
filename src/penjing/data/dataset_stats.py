"""Statistics of a data set before training: sizes, scripts, lengths, duplicates, and warnings.

One streaming pass. Memory: 8 bytes per length (at most a million of them), about 80 bytes per distinct
document for the duplicate check, and a table of character counts (9 MB).
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.data.clean.exact_duplicates import content_hash
from penjing.data.clean.rule import texts_of
from penjing.data.formats import (
    CHAT_FIELDS,
    DEFAULT_MAX_BAD,
    READERS,
    BadRecords,
    Chat,
    Document,
    Kind,
    Message,
    PreferenceRecord,
    sniff,
)
from penjing.data.formats.dispatch import kind_of, rows_of
from penjing.data.formats.fields import Columns, standard_record
from penjing.data.formats.source_location import SourceLocation

NUM_CODE_POINTS = 0x110000
RESERVOIR_SIZE = 1_000_000
NUM_LONGEST_LINES = 5
NUM_COMMON_CHARACTERS = 30
NUM_FIELDS_NAMED = 20
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
SPACES = (0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x20, 0x85, 0xA0, 0x2028, 0x2029, 0x3000)
SCRIPTS = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x24F), (0x1E00, 0x1EFF)),
    "Han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
    "Kana": ((0x3040, 0x30FF),),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7A3)),
    "Cyrillic": ((0x400, 0x52F),),
    "Greek": ((0x370, 0x3FF),),
    "Hebrew": ((0x590, 0x5FF),),
    "Arabic": ((0x600, 0x6FF), (0x750, 0x77F)),
    "Devanagari": ((0x900, 0x97F),),
    "Thai": ((0xE00, 0xE7F),),
    "digits": ((0x30, 0x39), (0xFF10, 0xFF19)),
}
CONTROLS = ((0x00, 0x08), (0x0E, 0x1F), (0x7F, 0x84), (0x86, 0x9F))

_UTF8_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF))  # of 1, 2, 3 and 4 bytes
_FLUSH_CHARACTERS = 1 << 20


def compute_stats(paths: Sequence[Path], kind: Kind, *, columns: Columns | None = None) -> Stats:
    """The statistics of files of one kind, unreadable records included. Raises UserError if nothing can be read."""
    bad_records = BadRecords(max_bad_fraction=1.0)
    return stats_of(kind, bad_records).count(READERS[kind](paths, bad_records=bad_records, columns=columns))


def stats_of(kind: Kind, bad_records: BadRecords) -> Stats:
    """Statistics of a kind, still empty."""
    return _STATS_BY_KIND[kind](bad_records)


def file_kind(path: Path, columns: Columns | None = None) -> Kind:
    """The kind of data in a file, from its first valid record. If that is a prompt, one chat record makes it chats.

    Raises UserError for an unknown kind.
    """
    kind = sniff(path, columns)
    if kind == "prompts" and any(_is_chat(path, line, record, columns or {}) for line, record in rows_of(path)):
        return "chats"
    return kind


def _is_chat(path: Path, line: int, record: dict[str, Any] | UserError, columns: Columns) -> bool:
    if isinstance(record, UserError):
        return False
    try:
        return kind_of(standard_record(record, columns, SourceLocation(path, line))) == "chats"
    except UserError:
        return False


class LengthStats:
    """Quantiles of integers: exact for up to `capacity` of them, else from a uniform reservoir sample."""

    def __init__(self, capacity: int = RESERVOIR_SIZE) -> None:
        self.capacity = capacity
        self.num_seen = 0
        self.smallest = self.largest = self.total = 0
        self._reservoir = array("q")
        self._random = random.Random(0)  # a fixed seed: the same corpus gives the same report

    def add(self, length: int) -> None:
        self.smallest = min(self.smallest, length) if self.num_seen else length
        self.largest = max(self.largest, length)
        self.num_seen += 1
        self.total += length
        if len(self._reservoir) < self.capacity:
            self._reservoir.append(length)
        else:
            slot = self._random.randrange(self.num_seen)
            if slot < self.capacity:
                self._reservoir[slot] = length

    @property
    def exact(self) -> bool:
        return self.num_seen <= self.capacity

    def quantiles(self) -> dict[str, int]:
        """The values at QUANTILES, each an observed value (nearest rank, rounded down); zeros without any values."""
        if not self.num_seen:
            return dict.fromkeys(QUANTILES, 0)
        ordered = np.sort(np.frombuffer(self._reservoir, dtype=np.int64))
        values = {name: int(ordered[int(fraction * (len(ordered) - 1))]) for name, fraction in QUANTILES.items()}
        return values | {"min": self.smallest, "max": self.largest}


class _Characters:
    """Counts of every code point, updated a million characters at a time."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_CODE_POINTS, dtype=np.int64)
        self._buffer: list[str] = []
        self._num_buffered = 0

    def add(self, text: str) -> None:
        self._buffer.append(text)
        self._num_buffered += len(text)
        if self._num_buffered >= _FLUSH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        codes = np.frombuffer("".join(self._buffer).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self._counts += np.bincount(codes, minlength=NUM_CODE_POINTS)
        self._buffer, self._num_buffered = [], 0

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each code point occurs."""
        if self._buffer:
            self._flush()
        return self._counts

    def total(self, ranges: Iterable[tuple[int, int]]) -> int:
        return int(sum(self.counts[first : last + 1].sum() for first, last in ranges))

    @property
    def num_bytes(self) -> int:
        """Size as UTF-8."""
        return sum(size * self.total([codes]) for size, codes in enumerate(_UTF8_LENGTHS, 1))

    def common(self, num: int) -> list[str]:
        """The most frequent characters without white space, most frequent first."""
        counts = self.counts
        order = np.argsort(-counts, kind="stable")[: num + len(SPACES)]
        return [chr(code) for code in order if counts[code] and code not in SPACES][:num]


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.content.encode("utf-8", "surrogatepass")) for message in messages)


class Stats(ABC):
    """Statistics of the records of one kind, in one pass.

    bad_records: the records that their reader rejects. lengths: by name.
    """

    singular: ClassVar[str]  # the name of a record
    plural: ClassVar[str]
    length_names: ClassVar[tuple[str, ...]]  # the names of `lengths`

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        self.bad_records = bad_records or BadRecords()
        self.num_records = 0
        self.characters = _Characters()
        self.lengths = {name: LengthStats() for name in self.length_names}
        self._seen: set[bytes] = set()

    def count(self, records: Iterable[Any]) -> Self:
        for record in records:
            self.num_records += 1
            self._seen.add(content_hash(record))
            for text in texts_of(record):
                self.characters.add(text)
            self.add(record)
        return self

    @abstractmethod
    def add(self, record: Any) -> None: ...

    @property
    def num_duplicates(self) -> int:
        """Records identical to an earlier one (128-bit hashes)."""
        return self.num_records - len(self._seen)

    @property
    def scripts(self) -> dict[str, float]:
        """The fraction of each script, of all characters that are not white space."""
        num_visible = int(self.characters.counts.sum()) - int(self.characters.counts[list(SPACES)].sum())
        fractions = {name: self.characters.total(ranges) / max(1, num_visible) for name, ranges in SCRIPTS.items()}
        return fractions | {"other": max(0.0, 1 - sum(fractions.values())) if num_visible else 0.0}

    @property
    def estimated_tokens(self) -> int:
        """As of a tokenizer for both languages: 1.6 Chinese characters a token, and 4 bytes of anything else."""
        num_han = self.characters.total(SCRIPTS["Han"])
        return round((self.characters.num_bytes - 3 * num_han) / 4 + num_han / 1.6)

    @property
    def lengths_exact(self) -> bool:
        """False if quantiles come from a uniform sample of a million records (min and max are always exact)."""
        return all(length_stats.exact for length_stats in self.lengths.values())

    @property
    def warnings(self) -> list[str]:
        warnings = self.quality_warnings() if self.num_records else [f"There is no {self.singular} at all."]
        return [*warnings, *self._bad_record_warnings()]

    def quality_warnings(self) -> Iterator[str]:
        """Warnings about the content; called with at least one record."""
        if self.num_duplicates >= 0.01 * self.num_records:
            share = _share(self.num_duplicates, self.num_records)
            yield f"{share} of {self.plural} are exact duplicates: a model memorizes them."

    def _bad_record_warnings(self) -> Iterator[str]:
        bad = self.bad_records
        for reason, count in bad.reasons.most_common():
            if count >= 0.01 * bad.records:
                yield f"{_share(count, bad.records)} of {self.plural} are left out: {reason}."
        if bad.bad:
            note = "" if bad.bad <= DEFAULT_MAX_BAD * bad.records else ", too many to train on as they are"
            yield f"{bad.bad:,} of {bad.records:,} records are broken{note}; the first: {bad.first[0]}"
        if bad.unread:
            yield f"Not read to the end, since damage hides where records begin: {', '.join(bad.unread[:5])}."


class DocumentStats(Stats):
    """Documents. longest: a heap of the longest lines as (characters, source, first line of the document)."""

    singular, plural = "text", "documents"
    length_names = ("document, bytes",)

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.longest: list[tuple[int, str, int]] = []

    def add(self, record: Document) -> None:
        text = record.text
        encoded = text.encode("utf-8", "surrogatepass")
        self.lengths["document, bytes"].add(len(encoded))
        longest = (max(map(len, text.split("\n"))), record.source, record.line)
        push = heapq.heappush if len(self.longest) < NUM_LONGEST_LINES else heapq.heappushpop
        push(self.longest, longest)

    @property
    def num_bytes(self) -> int:
        """Size as UTF-8."""
        return self.lengths["document, bytes"].total

    @property
    def num_characters(self) -> int:
        return int(self.characters.counts.sum())

    @property
    def num_distinct_characters(self) -> int:
        return int((self.characters.counts > 0).sum())

    @property
    def common_characters(self) -> list[str]:
        return self.characters.common(NUM_COMMON_CHARACTERS)

    def quality_warnings(self) -> Iterator[str]:
        lengths = self.lengths["document, bytes"]
        if self.num_records < 20:
            yield f"Only {self.num_records} documents: too few to hold some out; cut them or add more."
        elif lengths.largest > 0.2 * self.num_bytes:
            share = _share(lengths.largest, self.num_bytes)
            yield f"One document is {share} of all bytes: a split by document is uneven."
        if self.num_bytes < 1_000_000:
            yield f"Only {self.num_bytes / 1e6:.2f} MB of text: a model memorizes it in a few epochs."
        yield from super().quality_warnings()
        median = lengths.quantiles()["p50"]
        if median < 50:
            yield f"Half of the documents are {median} bytes or less: too short to teach anything beyond a phrase."
        yield from self._character_warnings()

    def _character_warnings(self) -> Iterator[str]:
        counts = self.characters.counts
        if counts[0xFFFD]:
            yield f"{counts[0xFFFD]} replacement characters (U+FFFD): some text was once decoded wrongly."
        num_controls = self.characters.total(CONTROLS)
        if num_controls:
            yield f"{num_controls} control characters: perhaps binary data or terminal colours."
        if counts[0x0D]:
            yield f"{counts[0x0D]} carriage returns: line ends of another system, which cost tokens."
        if counts[0x3000] > 0.005 * counts.sum():
            yield f"{counts[0x3000]} full-width spaces: indents of novels, which cost tokens."
        size, source, line = max(self.longest)
        if size > 100_000:
            yield f"The longest line has {size:,} characters ({source}:{line}): perhaps not prose."


class ChatStats(Stats):
    """Chats. Answers are assistant turns; a turn is any message but the system's. roles: messages by role."""

    singular, plural = "chat", "chats"
    length_names = ("conversation, messages", "answer, bytes")

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.roles: Counter[str] = Counter()
        self.num_tool_calls = self.num_unanswered = 0
        self.num_with_system = self.num_with_tools = self.num_with_reasoning = 0

    def add(self, record: Chat) -> None:
        roles = [message.role for message in record.messages]
        turns = [role for role in roles if role != "system"]
        self.roles.update(roles)
        self.lengths["conversation, messages"].add(len(turns))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(record.tools)
        self.num_with_reasoning += any(message.reasoning_content for message in record.messages)
        self.num_unanswered += turns[-1:] != ["assistant"]
        for message in record.messages:
            if message.role == "assistant":
                self.lengths["answer, bytes"].add(_num_bytes([message]))
                self.num_tool_calls += len(message.tool_calls)

    @property
    def num_answer_bytes(self) -> int:
        return self.lengths["answer, bytes"].total

    def quality_warnings(self) -> Iterator[str]:
        yield from super().quality_warnings()
        if self.num_unanswered >= 0.01 * self.num_records:
            yield f"{_share(self.num_unanswered, self.num_records)} of chats end on a turn that is never answered."
        if self.lengths["conversation, messages"].quantiles()["p95"] <= 2:
            yield "Nearly all chats are one question and one answer: the model will not learn to follow up."


class PreferenceStats(Stats):
    """Pairs of answers, and single labelled answers, which count as chosen (true) or rejected (false). The prompt is
    everything before the answer."""

    singular, plural = "preference", "records"
    length_names = ("prompt, bytes", "chosen, bytes", "rejected, bytes")

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.num_pairs = self.num_chosen_longer = 0

    def add(self, record: PreferenceRecord) -> None:
        sizes = [_num_bytes(chat.messages[-1:]) for chat in record.chats]
        for size, is_chosen in zip(sizes, record.is_chosen, strict=True):
            self.lengths["chosen, bytes" if is_chosen else "rejected, bytes"].add(size)
        self.lengths["prompt, bytes"].add(_num_bytes(record.chats[0].messages[:-1]))
        if len(sizes) == 2:
            self.num_pairs += 1
            self.num_chosen_longer += sizes[0] > sizes[1]

    def quality_warnings(self) -> Iterator[str]:
        yield from super().quality_warnings()
        if self.num_chosen_longer > 0.8 * self.num_pairs:
            share = _share(self.num_chosen_longer, self.num_pairs)
            yield f"The chosen answer is the longer one in {share} of pairs: a model may learn to be long."


class PromptStats(Stats):
    """Prompts. fields: number of records with each further field, such as a reference answer."""

    singular, plural = "prompt", "prompts"
    length_names = ("prompt, messages", "prompt, bytes")

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.num_with_system = self.num_with_tools = 0
        self.fields: Counter[str] = Counter()

    def add(self, record: Chat) -> None:
        roles = [message.role for message in record.messages]
        self.lengths["prompt, messages"].add(sum(role != "system" for role in roles))
        self.lengths["prompt, bytes"].add(_num_bytes(record.messages))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(record.tools)
        self.fields.update(str(name) for name in record.fields if name not in CHAT_FIELDS)


_STATS_BY_KIND: dict[Kind, type[Stats]] = {
    "documents": DocumentStats,
    "chats": ChatStats,
    "preferences": PreferenceStats,
    "prompts": PromptStats,
}


def _share(part: float, total: float) -> str:
    """A fraction in per cent: without decimals, or with one below 1 %."""
    percent = 100 * part / total
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
