"""What is in a corpus, counted before a model learns it: sizes, scripts, lengths, duplicates, and warnings in words.

One streaming pass, no printing. Memory: 8 bytes per length (at most a million of them), about 60 bytes per distinct
document for the duplicate check, and a table of character counts (9 MB).
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from penjing.data.stats_records import ChatStats, DatasetStats, LongLine, PreferenceStats, PromptStats

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
    """Count `documents` in one pass. skips: what their reader sets skips, counted by the time they end."""
    counter = _DocumentCounter(skips or SkipCounter())
    for document in documents:
        counter.add(document)
    return counter.result()


def survey_chats(chats: Iterable[Chat], *, skips: SkipCounter | None = None) -> ChatStats:
    """Count `chats` in one pass. skips: as for documents."""
    counter = _ChatCounter(skips or SkipCounter())
    for chat in chats:
        counter.add(chat)
    return counter.result()


def survey_preferences(preferences: Iterable[PreferenceRecord], *, skips: SkipCounter | None = None) -> PreferenceStats:
    """Count pairs and judged answers in one pass. skips: as for documents."""
    counter = _PreferenceCounter(skips or SkipCounter())
    for record in preferences:
        counter.add(record)
    return counter.result()


def survey_prompts(
    prompts: Iterable[tuple[Chat, Mapping[str, Any]]], *, skips: SkipCounter | None = None
) -> PromptStats:
    """Count prompts, each with its record, in one pass. skips: as for documents."""
    counter = _PromptCounter(skips or SkipCounter())
    for prompt, record in prompts:
        counter.add(prompt, record)
    return counter.result()


def survey_files(paths: Sequence[Path], kind: Kind) -> DatasetStats | ChatStats | PreferenceStats | PromptStats:
    """Count what files of one kind hold, and what of it cannot be read. Raises UserError if nothing can."""
    skips = SkipCounter()
    match kind:
        case "documents":
            return survey(read_documents(paths, on_skip=skips.skip, bad_records=skips.bad_records), skips=skips)
        case "chats":
            return survey_chats(read_chats(paths, on_skip=skips.skip, bad_records=skips.bad_records), skips=skips)
        case "preferences":
            records = read_preferences(paths, on_skip=skips.skip, bad_records=skips.bad_records)
            return survey_preferences(records, skips=skips)
        case "prompts":
            return survey_prompts(read_prompts(paths, bad_records=skips.bad_records), skips=skips)


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


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.content.encode("utf-8", "surrogatepass")) for message in messages)


class _DocumentCounter:
    def __init__(self, skips: SkipCounter) -> None:
        self.skips = skips
        self.num_documents = self.num_bytes = 0
        self.lengths = LengthStats()
        self.characters = _Characters()
        self.seen: set[int] = set()
        self.longest: list[tuple[int, str, int]] = []

    def add(self, document: Document) -> None:
        text = document.text
        encoded = text.encode("utf-8", "surrogatepass")
        self.num_documents += 1
        self.num_bytes += len(encoded)
        self.lengths.add(len(encoded))
        self.seen.add(int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little"))
        self.characters.add(text)
        longest = (max(map(len, text.split("\n"))), document.source, document.line)
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
        num_duplicates = self.num_documents - len(self.seen)
        return DatasetStats(
            num_documents=self.num_documents,
            num_broken=self.skips.bad_records.bad,
            left_out=dict(self.skips.left_out.most_common()),
            num_bytes=self.num_bytes,
            num_characters=num_characters,
            han_fraction=han,
            latin_fraction=latin,
            digit_fraction=digit,
            other_fraction=max(0.0, 1 - han - latin - digit) if num_visible else 0.0,
            length_bytes=self.lengths.quantiles(),
            lengths_exact=self.lengths.exact,
            num_duplicates=num_duplicates,
            duplicate_fraction=num_duplicates / max(1, self.num_documents),
            num_distinct_characters=int((characters.counts > 0).sum()),
            common_characters=characters.common(NUM_COMMON_CHARACTERS),
            longest_lines=tuple(
                LongLine(num_characters=size, source=source, line=line)
                for size, source, line in sorted(self.longest, reverse=True)
            ),
            warnings=(*self.warnings(num_duplicates), *self.skips.warnings("documents")),
        )

    def warnings(self, num_duplicates: int) -> Iterator[str]:
        if not self.num_documents:
            yield "There is no text at all."
            return
        largest = self.lengths.largest
        if self.num_documents < 20:
            yield f"Only {self.num_documents} documents: too few to hold some out; cut them or add more."
        elif largest > 0.2 * self.num_bytes:
            yield f"One document is {_share(largest, self.num_bytes)} of all bytes: a split by document is uneven."
        if self.num_bytes < 1_000_000:
            yield f"Only {self.num_bytes / 1e6:.2f} MB of text: a model memorizes it in a few epochs."
        if num_duplicates >= 0.01 * self.num_documents:
            share = _share(num_duplicates, self.num_documents)
            yield f"{share} of documents are exact duplicates: a model memorizes them."
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


class _ChatCounter:
    def __init__(self, skips: SkipCounter) -> None:
        self.skips = skips
        self.roles: Counter[str] = Counter()
        self.turns = LengthStats()
        self.answers = LengthStats()
        self.seen: set[int] = set()
        self.num_answer_bytes = self.num_tool_calls = 0
        self.num_with_system = self.num_with_tools = self.num_with_reasoning = 0
        self.num_unanswered = 0

    def add(self, chat: Chat) -> None:
        roles = [message.role for message in chat.messages]
        turns = [role for role in roles if role != "system"]
        self.roles.update(roles)
        self.turns.add(len(turns))
        self.seen.add(_digest(repr((chat.messages, chat.tools))))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(chat.tools)
        self.num_with_reasoning += any(message.reasoning_content for message in chat.messages)
        self.num_unanswered += turns[-1:] != ["assistant"]
        for message in chat.messages:
            if message.role == "assistant":
                num_bytes = _num_bytes([message])
                self.answers.add(num_bytes)
                self.num_answer_bytes += num_bytes
                self.num_tool_calls += len(message.tool_calls)

    def result(self) -> ChatStats:
        return ChatStats(
            num_chats=self.turns.num_seen,
            num_broken=self.skips.bad_records.bad,
            left_out=dict(self.skips.left_out.most_common()),
            num_answers=self.answers.num_seen,
            num_answer_bytes=self.num_answer_bytes,
            roles=dict(self.roles.most_common()),
            turns_per_chat=self.turns.quantiles(),
            answer_bytes=self.answers.quantiles(),
            lengths_exact=self.turns.exact and self.answers.exact,
            num_with_system=self.num_with_system,
            num_with_tools=self.num_with_tools,
            num_with_reasoning=self.num_with_reasoning,
            num_tool_calls=self.num_tool_calls,
            num_duplicates=self.turns.num_seen - len(self.seen),
            warnings=(*self.warnings(), *self.skips.warnings("chats")),
        )

    def warnings(self) -> Iterator[str]:
        num_chats = self.turns.num_seen
        if not num_chats:
            yield "There is no chat at all."
            return
        yield from _duplicate_warnings(num_chats - len(self.seen), num_chats, "chats")
        if self.num_unanswered >= 0.01 * num_chats:
            yield f"{_share(self.num_unanswered, num_chats)} of chats end on a turn that is never answered."
        if self.turns.quantiles()["p95"] <= 2:
            yield "Nearly all chats are one question and one answer: the model will not learn to follow up."


class _PreferenceCounter:
    def __init__(self, skips: SkipCounter) -> None:
        self.skips = skips
        self.prompts, self.chosen, self.rejected = LengthStats(), LengthStats(), LengthStats()
        self.num_pairs = self.num_judged = self.num_chosen_longer = 0
        self.seen: set[int] = set()

    def add(self, record: PreferenceRecord) -> None:
        sizes = [_num_bytes(chat.messages[-1:]) for chat in record.chats]
        for size, wanted in zip(sizes, record.wanted, strict=True):
            (self.chosen if wanted else self.rejected).add(size)
        self.prompts.add(_num_bytes(record.chats[0].messages[:-1]))
        if len(sizes) == 2:
            self.num_pairs += 1
            self.num_chosen_longer += sizes[0] > sizes[1]
        else:
            self.num_judged += 1
        self.seen.add(_digest(repr((record.wanted, [(chat.messages, chat.tools) for chat in record.chats]))))

    def result(self) -> PreferenceStats:
        return PreferenceStats(
            num_pairs=self.num_pairs,
            num_judged=self.num_judged,
            num_broken=self.skips.bad_records.bad,
            left_out=dict(self.skips.left_out.most_common()),
            prompt_bytes=self.prompts.quantiles(),
            chosen_bytes=self.chosen.quantiles(),
            rejected_bytes=self.rejected.quantiles(),
            lengths_exact=self.prompts.exact and self.chosen.exact and self.rejected.exact,
            chosen_longer_fraction=self.num_chosen_longer / max(1, self.num_pairs),
            num_duplicates=self.prompts.num_seen - len(self.seen),
            warnings=(*self.warnings(), *self.skips.warnings("records")),
        )

    def warnings(self) -> Iterator[str]:
        num_records = self.prompts.num_seen
        if not num_records:
            yield "There is no preference at all."
            return
        yield from _duplicate_warnings(num_records - len(self.seen), num_records, "records")
        if self.num_chosen_longer > 0.8 * self.num_pairs:
            share = _share(self.num_chosen_longer, self.num_pairs)
            yield f"The chosen answer is the longer one in {share} of pairs: a model may learn to be long."


class _PromptCounter:
    def __init__(self, skips: SkipCounter) -> None:
        self.skips = skips
        self.turns, self.sizes = LengthStats(), LengthStats()
        self.num_with_system = self.num_with_tools = 0
        self.fields: Counter[str] = Counter()
        self.seen: set[int] = set()

    def add(self, prompt: Chat, record: Mapping[str, Any]) -> None:
        roles = [message.role for message in prompt.messages]
        self.turns.add(sum(role != "system" for role in roles))
        self.sizes.add(_num_bytes(prompt.messages))
        self.num_with_system += "system" in roles
        self.num_with_tools += bool(prompt.tools)
        self.fields.update(str(name) for name in record if name not in CHAT_FIELDS)
        self.seen.add(_digest(repr((prompt.messages, prompt.tools))))

    def result(self) -> PromptStats:
        return PromptStats(
            num_prompts=self.turns.num_seen,
            num_broken=self.skips.bad_records.bad,
            turns_per_prompt=self.turns.quantiles(),
            prompt_bytes=self.sizes.quantiles(),
            lengths_exact=self.turns.exact,
            num_with_system=self.num_with_system,
            num_with_tools=self.num_with_tools,
            fields=dict(self.fields.most_common(NUM_FIELDS_NAMED)),
            num_duplicates=self.turns.num_seen - len(self.seen),
            warnings=(*self.warnings(), *self.skips.warnings("prompts")),
        )

    def warnings(self) -> Iterator[str]:
        num_prompts = self.turns.num_seen
        if not num_prompts:
            yield "There is no prompt at all."
            return
        yield from _duplicate_warnings(num_prompts - len(self.seen), num_prompts, "prompts")


def _duplicate_warnings(num_duplicates: int, num: int, what: str) -> Iterator[str]:
    if num_duplicates >= 0.01 * num:
        yield f"{_share(num_duplicates, num)} of {what} are exact duplicates: a model memorizes them."


def _share(part: float, whole: float) -> str:
    """A fraction for people: whole per cent, or one digit below one per cent."""
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
