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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

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
from penjing.data.stats_records import ChatStats, DatasetStats, LongLine, PreferenceStats, PromptStats, Stats

NUM_CODE_POINTS = 0x110000
NUM_LENGTHS_KEPT = 1_000_000
NUM_LONGEST_LINES = 5
NUM_COMMON_CHARACTERS = 30
NUM_FIELDS_NAMED = 20
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
SPACES = (0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x20, 0x85, 0xA0, 0x2028, 0x2029, 0x3000)
HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))
LATIN = ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x24F), (0x1E00, 0x1EFF))
DIGITS = ((0x30, 0x39), (0xFF10, 0xFF19))
CONTROLS = ((0x00, 0x08), (0x0E, 0x1F), (0x7F, 0x84), (0x86, 0x9F))

_FLUSH_CHARACTERS = 1 << 20
Found = TypeVar("Found", bound=Stats)


class SkipCounter:
    """What a reader does not hand out, counted: give it on_skip=skips.skip and bad_records=skips.bad_records."""

    def __init__(self, max_bad_fraction: float = 1.0) -> None:
        """max_bad_fraction: share of all records that may be broken; more are a UserError at the end of the reading."""
        self.bad_records = BadRecords(max_bad_fraction)
        self.left_out: Counter[str] = Counter()

    def skip(self, file: str, line: int, reason: str) -> None:
        """One whole record with nothing to learn from."""
        self.left_out[reason] += 1

    def warnings(self, what: str) -> Iterator[str]:
        """`what` is the plural of what is surveyed."""
        num_records, num_broken = self.bad_records.records, self.bad_records.bad
        for reason, num in self.left_out.most_common():
            if num >= 0.01 * num_records:
                yield f"{_share(num, num_records)} of {what} are left out: {reason}."
        if num_broken:
            many = "" if num_broken <= DEFAULT_MAX_BAD * num_records else ", too many to train on as they are"
            yield f"{num_broken:,} of {num_records:,} records are broken{many}; the first: {self.bad_records.first[0]}"
        if self.bad_records.unread:
            yield f"Not read to the end, for damage that hides what follows: {', '.join(self.bad_records.unread[:5])}."


def survey(documents: Iterable[Document], *, skips: SkipCounter | None = None) -> DatasetStats:
    """Count `documents` in one pass. skips: what their reader sets aside, counted by the time they end."""
    return _DocumentCounter(skips).count(documents)


def survey_chats(chats: Iterable[Chat], *, skips: SkipCounter | None = None) -> ChatStats:
    """Count `chats` in one pass. skips: as for documents."""
    return _ChatCounter(skips).count(chats)


def survey_files(paths: Sequence[Path], kind: Kind) -> Stats:
    """Count what files of one kind hold, and what of it cannot be read. Raises UserError if nothing can."""
    skips = SkipCounter()
    on_skip, bad_records = skips.skip, skips.bad_records
    match kind:
        case "documents":
            return survey(read_documents(paths, on_skip=on_skip, bad_records=bad_records), skips=skips)
        case "chats":
            return survey_chats(read_chats(paths, on_skip=on_skip, bad_records=bad_records), skips=skips)
        case "preferences":
            return _PreferenceCounter(skips).count(read_preferences(paths, on_skip=on_skip, bad_records=bad_records))
        case "prompts":
            return _PromptCounter(skips).count(read_prompts(paths, bad_records=bad_records))


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
        self.smallest = self.largest = 0
        self._kept = array("q")
        self._random = random.Random(0)  # a fixed seed: the same corpus gives the same report

    def add(self, length: int) -> None:
        self.smallest = min(self.smallest, length) if self.num_seen else length
        self.largest = max(self.largest, length)
        self.num_seen += 1
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
        self.counts = np.zeros(NUM_CODE_POINTS, dtype=np.int64)
        self._pieces: list[str] = []
        self._num_waiting = 0

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._num_waiting += len(text)
        if self._num_waiting >= _FLUSH_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        codes = np.frombuffer("".join(self._pieces).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        self.counts += np.bincount(codes, minlength=NUM_CODE_POINTS)
        self._pieces, self._num_waiting = [], 0

    def total(self, ranges: Sequence[tuple[int, int]]) -> int:
        return int(sum(self.counts[first : last + 1].sum() for first, last in ranges))

    def common(self, num: int) -> tuple[tuple[str, int], ...]:
        order = np.argsort(-self.counts, kind="stable")[: num + len(SPACES)]
        found = [(chr(code), int(self.counts[code])) for code in order if self.counts[code] and code not in SPACES]
        return tuple(found[:num])


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.content.encode("utf-8", "surrogatepass")) for message in messages)


class _Counter(ABC, Generic[Found]):
    """Counts records of one kind in one pass. one, many: what they are called."""

    one: ClassVar[str]
    many: ClassVar[str]

    def __init__(self, skips: SkipCounter | None) -> None:
        self.skips = skips or SkipCounter()
        self.num_records = 0
        self._seen: set[bytes] = set()

    def count(self, records: Iterable[Any]) -> Found:
        for record in records:
            self.num_records += 1
            self.add(record)
        return self.result()

    @abstractmethod
    def add(self, record: Any) -> None: ...

    @abstractmethod
    def result(self) -> Found: ...

    def see(self, content: bytes) -> None:
        """Note all that a record says, by which duplicates are found."""
        self._seen.add(hashlib.blake2b(content, digest_size=8).digest())

    @property
    def num_duplicates(self) -> int:
        return self.num_records - len(self._seen)

    def common(self, *lengths: LengthStats) -> dict[str, Any]:
        """The figures that every kind has. lengths: all that were taken."""
        return {
            "num_broken": self.skips.bad_records.bad,
            "left_out": dict(self.skips.left_out.most_common()),
            "lengths_exact": all(each.exact for each in lengths),
            "num_duplicates": self.num_duplicates,
            "warnings": (
                *(self.warnings() if self.num_records else [f"There is no {self.one} at all."]),
                *self.skips.warnings(self.many),
            ),
        }

    def warnings(self) -> Iterator[str]:
        """What is odd about the records, of which there is at least one."""
        if self.num_duplicates >= 0.01 * self.num_records:
            share = _share(self.num_duplicates, self.num_records)
            yield f"{share} of {self.many} are exact duplicates: a model memorizes them."


class _DocumentCounter(_Counter[DatasetStats]):
    one, many = "text", "documents"

    def __init__(self, skips: SkipCounter | None) -> None:
        super().__init__(skips)
        self.num_bytes = 0
        self.lengths = LengthStats()
        self.characters = _Characters()
        self.longest: list[tuple[int, str, int]] = []

    def add(self, record: Document) -> None:
        text = record.text
        encoded = text.encode("utf-8", "surrogatepass")
        self.num_bytes += len(encoded)
        self.lengths.add(len(encoded))
        self.see(encoded)
        self.characters.add(text)
        longest = (max(map(len, text.split("\n"))), record.source, record.line)
        if len(self.longest) < NUM_LONGEST_LINES:
            heapq.heappush(self.longest, longest)
        elif longest > self.longest[0]:
            heapq.heapreplace(self.longest, longest)

    def result(self) -> DatasetStats:
        characters = self.characters
        characters.flush()
        num_characters = int(characters.counts.sum())
        num_visible = num_characters - int(characters.counts[list(SPACES)].sum())
        han, latin, digit = (characters.total(ranges) / max(1, num_visible) for ranges in (HAN, LATIN, DIGITS))
        return DatasetStats(
            num_documents=self.num_records,
            num_bytes=self.num_bytes,
            num_characters=num_characters,
            han_fraction=han,
            latin_fraction=latin,
            digit_fraction=digit,
            other_fraction=max(0.0, 1 - han - latin - digit) if num_visible else 0.0,
            length_bytes=self.lengths.quantiles(),
            duplicate_fraction=self.num_duplicates / max(1, self.num_records),
            num_distinct_characters=int((characters.counts > 0).sum()),
            common_characters=characters.common(NUM_COMMON_CHARACTERS),
            longest_lines=tuple(
                LongLine(num_characters=size, source=source, line=line)
                for size, source, line in sorted(self.longest, reverse=True)
            ),
            **self.common(self.lengths),
        )

    def warnings(self) -> Iterator[str]:
        largest = self.lengths.largest
        if self.num_records < 20:
            yield f"Only {self.num_records} documents: too few to hold some out; cut them or add more."
        elif largest > 0.2 * self.num_bytes:
            yield f"One document is {_share(largest, self.num_bytes)} of all bytes: a split by document is uneven."
        if self.num_bytes < 1_000_000:
            yield f"Only {self.num_bytes / 1e6:.2f} MB of text: a model memorizes it in a few epochs."
        yield from super().warnings()
        median = self.lengths.quantiles()["p50"]
        if median < 50:
            yield f"Half of the documents are {median} bytes or less: too short to teach anything beyond a phrase."
        yield from self.character_warnings()

    def character_warnings(self) -> Iterator[str]:
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


class _ChatCounter(_Counter[ChatStats]):
    one, many = "chat", "chats"

    def __init__(self, skips: SkipCounter | None) -> None:
        super().__init__(skips)
        self.roles: Counter[str] = Counter()
        self.turns, self.answers = LengthStats(), LengthStats()
        self.num_answer_bytes = self.num_tool_calls = self.num_unanswered = 0
        self.num_with_system = self.num_with_tools = self.num_with_reasoning = 0

    def add(self, record: Chat) -> None:
        roles = [message.role for message in record.messages]
        turns = [role for role in roles if role != "system"]
        self.roles.update(roles)
        self.turns.add(len(turns))
        self.see(_all_of(record))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(record.tools)
        self.num_with_reasoning += any(message.reasoning_content for message in record.messages)
        self.num_unanswered += turns[-1:] != ["assistant"]
        for message in record.messages:
            if message.role == "assistant":
                num_bytes = _num_bytes([message])
                self.answers.add(num_bytes)
                self.num_answer_bytes += num_bytes
                self.num_tool_calls += len(message.tool_calls)

    def result(self) -> ChatStats:
        return ChatStats(
            num_chats=self.num_records,
            num_answers=self.answers.num_seen,
            num_answer_bytes=self.num_answer_bytes,
            roles=dict(self.roles.most_common()),
            turns_per_chat=self.turns.quantiles(),
            answer_bytes=self.answers.quantiles(),
            num_with_system=self.num_with_system,
            num_with_tools=self.num_with_tools,
            num_with_reasoning=self.num_with_reasoning,
            num_tool_calls=self.num_tool_calls,
            **self.common(self.turns, self.answers),
        )

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        if self.num_unanswered >= 0.01 * self.num_records:
            yield f"{_share(self.num_unanswered, self.num_records)} of chats end on a turn that is never answered."
        if self.turns.quantiles()["p95"] <= 2:
            yield "Nearly all chats are one question and one answer: the model will not learn to follow up."


class _PreferenceCounter(_Counter[PreferenceStats]):
    one, many = "preference", "records"

    def __init__(self, skips: SkipCounter | None) -> None:
        super().__init__(skips)
        self.prompts, self.chosen, self.rejected = LengthStats(), LengthStats(), LengthStats()
        self.num_pairs = self.num_chosen_longer = 0

    def add(self, record: PreferenceRecord) -> None:
        sizes = [_num_bytes(chat.messages[-1:]) for chat in record.chats]
        for size, wanted in zip(sizes, record.wanted, strict=True):
            (self.chosen if wanted else self.rejected).add(size)
        self.prompts.add(_num_bytes(record.chats[0].messages[:-1]))
        if len(sizes) == 2:
            self.num_pairs += 1
            self.num_chosen_longer += sizes[0] > sizes[1]
        self.see(repr(record.wanted).encode() + b"".join(map(_all_of, record.chats)))

    def result(self) -> PreferenceStats:
        return PreferenceStats(
            num_pairs=self.num_pairs,
            num_judged=self.num_records - self.num_pairs,
            prompt_bytes=self.prompts.quantiles(),
            chosen_bytes=self.chosen.quantiles(),
            rejected_bytes=self.rejected.quantiles(),
            chosen_longer_fraction=self.num_chosen_longer / max(1, self.num_pairs),
            **self.common(self.prompts, self.chosen, self.rejected),
        )

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        if self.num_chosen_longer > 0.8 * self.num_pairs:
            share = _share(self.num_chosen_longer, self.num_pairs)
            yield f"The chosen answer is the longer one in {share} of pairs: a model may learn to be long."


class _PromptCounter(_Counter[PromptStats]):
    one, many = "prompt", "prompts"

    def __init__(self, skips: SkipCounter | None) -> None:
        super().__init__(skips)
        self.turns, self.sizes = LengthStats(), LengthStats()
        self.num_with_system = self.num_with_tools = 0
        self.fields: Counter[str] = Counter()

    def add(self, record: tuple[Chat, Mapping[str, Any]]) -> None:
        prompt, fields = record
        roles = [message.role for message in prompt.messages]
        self.turns.add(sum(role != "system" for role in roles))
        self.sizes.add(_num_bytes(prompt.messages))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(prompt.tools)
        self.fields.update(str(name) for name in fields if name not in CHAT_FIELDS)
        self.see(_all_of(prompt))

    def result(self) -> PromptStats:
        return PromptStats(
            num_prompts=self.num_records,
            turns_per_prompt=self.turns.quantiles(),
            prompt_bytes=self.sizes.quantiles(),
            num_with_system=self.num_with_system,
            num_with_tools=self.num_with_tools,
            fields=dict(self.fields.most_common(NUM_FIELDS_NAMED)),
            **self.common(self.turns, self.sizes),
        )


def _all_of(chat: Chat) -> bytes:
    return repr((chat.messages, chat.tools)).encode("utf-8", "surrogatepass")


def _share(part: float, whole: float) -> str:
    """A fraction for people: whole per cent, or one digit below one per cent."""
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
