"""What is in a corpus, counted before a model learns it: sizes, scripts, lengths, duplicates, and warnings in words.

One streaming pass, no printing. Memory: 8 bytes per length (at most a million of them), about 60 bytes per distinct
document for the duplicate check, and a table of character counts (9 MB).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.data.formats import (
    CHAT_FIELDS,
    DEFAULT_MAX_BAD,
    BadRecords,
    Chat,
    Document,
    Kind,
    Message,
    PreferenceRecord,
    read_chats,
    read_documents,
    read_preferences,
    read_prompts,
    sniff,
)
from penjing.data.formats.dispatch import kind_of, rows_of

NUM_CODE_POINTS = 0x110000
NUM_LENGTHS_KEPT = 1_000_000
NUM_LONGEST_LINES = 5
NUM_COMMON_CHARACTERS = 30
NUM_FIELDS_NAMED = 20
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
SPACES = (0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x20, 0x85, 0xA0, 0x2028, 0x2029, 0x3000)
SCRIPTS = {
    "Latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x24F), (0x1E00, 0x1EFF)),
    "Han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
    "digits": ((0x30, 0x39), (0xFF10, 0xFF19)),
}
CONTROLS = ((0x00, 0x08), (0x0E, 0x1F), (0x7F, 0x84), (0x86, 0x9F))

_FLUSH_CHARACTERS = 1 << 20


def survey_files(paths: Sequence[Path], kind: Kind) -> Stats:
    """Count what files of one kind hold, and what of it cannot be read. Raises UserError if nothing can."""
    stats, read = _OF_KIND[kind]
    bad_records = BadRecords(max_bad_fraction=1.0)
    return stats(bad_records).count(read(paths, bad_records=bad_records))


def file_kind(path: Path) -> Kind:
    """What a file holds, by its first whole record; chats also if that one waits for an answer and another has its own.

    Raises UserError if it is no kind of data.
    """
    kind = sniff(path)
    return "chats" if kind == "prompts" and any(_is_chat(record) for _, record in rows_of(path)) else kind


def _is_chat(record: dict[str, Any] | UserError) -> bool:
    return not isinstance(record, UserError) and kind_of(record) == "chats"


class LengthStats:
    """Quantiles of many whole numbers: exact up to `num_kept` of them, from a uniform reservoir beyond."""

    def __init__(self, num_kept: int = NUM_LENGTHS_KEPT) -> None:
        self.num_kept = num_kept
        self.num_seen = 0
        self.smallest = self.largest = self.total = 0
        self._kept = array("q")
        self._random = random.Random(0)  # a fixed seed: the same corpus gives the same report

    def add(self, length: int) -> None:
        self.smallest = min(self.smallest, length) if self.num_seen else length
        self.largest = max(self.largest, length)
        self.num_seen += 1
        self.total += length
        if len(self._kept) < self.num_kept:
            self._kept.append(length)
        else:
            place = self._random.randrange(self.num_seen)
            if place < self.num_kept:
                self._kept[place] = length

    @property
    def exact(self) -> bool:
        return self.num_seen <= self.num_kept

    def quantiles(self) -> dict[str, int]:
        """The values at QUANTILES, each one that occurs (nearest rank, rounded down); zeros when nothing was seen."""
        if not self.num_seen:
            return dict.fromkeys(QUANTILES, 0)
        ordered = np.sort(np.frombuffer(self._kept, dtype=np.int64))
        found = {name: int(ordered[int(share * (len(ordered) - 1))]) for name, share in QUANTILES.items()}
        return found | {"min": self.smallest, "max": self.largest}


class _Characters:
    """Counts of every code point, gathered a million characters at a time."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_CODE_POINTS, dtype=np.int64)
        self._pieces: list[str] = []
        self._num_waiting = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._num_waiting += len(text)
        if self._num_waiting >= _FLUSH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        codes = np.frombuffer("".join(self._pieces).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self._counts += np.bincount(codes, minlength=NUM_CODE_POINTS)
        self._pieces, self._num_waiting = [], 0

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How often each code point occurs."""
        if self._pieces:
            self._flush()
        return self._counts

    def total(self, ranges: Iterable[tuple[int, int]]) -> int:
        return int(sum(self.counts[first : last + 1].sum() for first, last in ranges))

    def common(self, num: int) -> list[str]:
        """The most frequent first, white space left out."""
        counts = self.counts
        order = np.argsort(-counts, kind="stable")[: num + len(SPACES)]
        return [chr(code) for code in order if counts[code] and code not in SPACES][:num]


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.content.encode("utf-8", "surrogatepass")) for message in messages)


class Stats(ABC):
    """What records of one kind hold, counted in one pass.

    bad_records: what their reader sets aside. lengths: by what they are of.
    """

    one: ClassVar[str]  # what a record is called
    many: ClassVar[str]
    measured: ClassVar[tuple[str, ...]]  # the names of `lengths`

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        self.bad_records = bad_records or BadRecords()
        self.num_records = 0
        self.lengths = {name: LengthStats() for name in self.measured}
        self._seen: set[bytes] = set()

    def count(self, records: Iterable[Any]) -> Self:
        for record in records:
            self.num_records += 1
            self.add(record)
        return self

    @abstractmethod
    def add(self, record: Any) -> None: ...

    def see(self, content: bytes) -> None:
        """Note all that a record says, by which duplicates are found."""
        self._seen.add(hashlib.blake2b(content, digest_size=8).digest())

    @property
    def num_duplicates(self) -> int:
        """Records that are byte for byte some earlier one (64-bit hashes)."""
        return self.num_records - len(self._seen)

    @property
    def lengths_exact(self) -> bool:
        """False: quantiles are of a uniform sample of a million records (min and max are always exact)."""
        return all(each.exact for each in self.lengths.values())

    @property
    def warnings(self) -> list[str]:
        odd = self.oddities() if self.num_records else [f"There is no {self.one} at all."]
        return [*odd, *self._set_aside()]

    def oddities(self) -> Iterator[str]:
        """What is odd about the records, of which there is at least one."""
        if self.num_duplicates >= 0.01 * self.num_records:
            share = _share(self.num_duplicates, self.num_records)
            yield f"{share} of {self.many} are exact duplicates: a model memorizes them."

    def _set_aside(self) -> Iterator[str]:
        bad = self.bad_records
        for reason, num in bad.reasons.most_common():
            if num >= 0.01 * bad.records:
                yield f"{_share(num, bad.records)} of {self.many} are left out: {reason}."
        if bad.bad:
            many = "" if bad.bad <= DEFAULT_MAX_BAD * bad.records else ", too many to train on as they are"
            yield f"{bad.bad:,} of {bad.records:,} records are broken{many}; the first: {bad.first[0]}"
        if bad.unread:
            yield f"Not read to the end, for damage that hides what follows: {', '.join(bad.unread[:5])}."


class DocumentStats(Stats):
    """Documents. longest: (characters, source, line where its document starts) of the longest lines, a heap."""

    one, many = "text", "documents"
    measured = ("document, bytes",)

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.characters = _Characters()
        self.longest: list[tuple[int, str, int]] = []

    def add(self, record: Document) -> None:
        text = record.text
        encoded = text.encode("utf-8", "surrogatepass")
        self.lengths["document, bytes"].add(len(encoded))
        self.see(encoded)
        self.characters.add(text)
        longest = (max(map(len, text.split("\n"))), record.source, record.line)
        push = heapq.heappush if len(self.longest) < NUM_LONGEST_LINES else heapq.heappushpop
        push(self.longest, longest)

    @property
    def num_bytes(self) -> int:
        """As UTF-8."""
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

    @property
    def scripts(self) -> dict[str, float]:
        """The fraction of each script, of all characters that are not white space."""
        num_visible = self.num_characters - int(self.characters.counts[list(SPACES)].sum())
        found = {name: self.characters.total(ranges) / max(1, num_visible) for name, ranges in SCRIPTS.items()}
        return found | {"other": max(0.0, 1 - sum(found.values())) if num_visible else 0.0}

    def oddities(self) -> Iterator[str]:
        lengths = self.lengths["document, bytes"]
        if self.num_records < 20:
            yield f"Only {self.num_records} documents: too few to hold some out; cut them or add more."
        elif lengths.largest > 0.2 * self.num_bytes:
            share = _share(lengths.largest, self.num_bytes)
            yield f"One document is {share} of all bytes: a split by document is uneven."
        if self.num_bytes < 1_000_000:
            yield f"Only {self.num_bytes / 1e6:.2f} MB of text: a model memorizes it in a few epochs."
        yield from super().oddities()
        median = lengths.quantiles()["p50"]
        if median < 50:
            yield f"Half of the documents are {median} bytes or less: too short to teach anything beyond a phrase."
        yield from self._odd_characters()

    def _odd_characters(self) -> Iterator[str]:
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

    one, many = "chat", "chats"
    measured = ("conversation, messages", "answer, bytes")

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
        self.see(_all_of(record))
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

    def oddities(self) -> Iterator[str]:
        yield from super().oddities()
        if self.num_unanswered >= 0.01 * self.num_records:
            yield f"{_share(self.num_unanswered, self.num_records)} of chats end on a turn that is never answered."
        if self.lengths["conversation, messages"].quantiles()["p95"] <= 2:
            yield "Nearly all chats are one question and one answer: the model will not learn to follow up."


class PreferenceStats(Stats):
    """Pairs of answers and single judged ones. Chosen are the wanted answers, rejected the others; the prompt is all
    that comes before the answer."""

    one, many = "preference", "records"
    measured = ("prompt, bytes", "chosen, bytes", "rejected, bytes")

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.num_pairs = self.num_chosen_longer = 0

    def add(self, record: PreferenceRecord) -> None:
        sizes = [_num_bytes(chat.messages[-1:]) for chat in record.chats]
        for size, wanted in zip(sizes, record.wanted, strict=True):
            self.lengths["chosen, bytes" if wanted else "rejected, bytes"].add(size)
        self.lengths["prompt, bytes"].add(_num_bytes(record.chats[0].messages[:-1]))
        if len(sizes) == 2:
            self.num_pairs += 1
            self.num_chosen_longer += sizes[0] > sizes[1]
        self.see(repr(record.wanted).encode() + b"".join(map(_all_of, record.chats)))

    def oddities(self) -> Iterator[str]:
        yield from super().oddities()
        if self.num_chosen_longer > 0.8 * self.num_pairs:
            share = _share(self.num_chosen_longer, self.num_pairs)
            yield f"The chosen answer is the longer one in {share} of pairs: a model may learn to be long."


class PromptStats(Stats):
    """Conversations that wait for an answer. fields: records that have a further field, such as a reference answer."""

    one, many = "prompt", "prompts"
    measured = ("prompt, messages", "prompt, bytes")

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        super().__init__(bad_records)
        self.num_with_system = self.num_with_tools = 0
        self.fields: Counter[str] = Counter()

    def add(self, record: tuple[Chat, Mapping[str, Any]]) -> None:
        prompt, fields = record
        roles = [message.role for message in prompt.messages]
        self.lengths["prompt, messages"].add(sum(role != "system" for role in roles))
        self.lengths["prompt, bytes"].add(_num_bytes(prompt.messages))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(prompt.tools)
        self.fields.update(str(name) for name in fields if name not in CHAT_FIELDS)
        self.see(_all_of(prompt))


_OF_KIND: dict[Kind, tuple[type[Stats], Callable[..., Iterator[Any]]]] = {
    "documents": (DocumentStats, read_documents),
    "chats": (ChatStats, read_chats),
    "preferences": (PreferenceStats, read_preferences),
    "prompts": (PromptStats, read_prompts),
}


def _all_of(chat: Chat) -> bytes:
    return repr((chat.messages, chat.tools)).encode("utf-8", "surrogatepass")


def _share(part: float, whole: float) -> str:
    """A fraction for people: whole per cent, or one digit below one per cent."""
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
