"""Statistics of a data set before training: sizes, scripts, lengths, duplicates, and warnings.

One streaming pass. Memory: 8 bytes per length, and about 80 bytes per distinct record for the duplicate check.
"""

import unicodedata
from abc import ABC, abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Self

from penjing.base.formatting import megabytes
from penjing.data.clean.exact_duplicates import content_hash
from penjing.data.clean.rule import texts_of
from penjing.data.formats import CHAT_FIELDS, DEFAULT_MAX_BAD, BadRecords, Chat, Document, Kind, PreferenceRecord
from penjing.data.formats.schema import Message

NUM_FIELDS_NAMED = 20
QUANTILES = {"min": 0.0, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
_SCRIPTS = {  # by the first word of a character's name
    "LATIN": "Latin", "CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana", "KATAKANA-HIRAGANA": "Kana",
    "HANGUL": "Hangul", "CYRILLIC": "Cyrillic", "GREEK": "Greek", "HEBREW": "Hebrew", "ARABIC": "Arabic",
    "DEVANAGARI": "Devanagari", "THAI": "Thai", "DIGIT": "digits",
}  # fmt: skip
_WHITE_CONTROLS = "\t\n\v\f\r\x85"


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """The values at QUANTILES, each an observed value (nearest rank, rounded down); zeros without any values."""
    ordered = sorted(lengths) or [0]
    return {name: ordered[int(share * (len(ordered) - 1))] for name, share in QUANTILES.items()}


def _num_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.text.encode("utf-8", "surrogatepass")) for message in messages)


class Stats(ABC):
    """Statistics of the records of one kind, in one pass.

    bad_records: the records that their reader rejects. lengths, counts, tables: by the name of their row in a report.
    """

    singular: ClassVar[str]  # the name of a record
    plural: ClassVar[str]

    def __init__(self, bad_records: BadRecords | None = None) -> None:
        self.bad_records = bad_records or BadRecords()
        self.num_records = 0
        self.characters: Counter[str] = Counter()
        self.lengths: defaultdict[str, array[int]] = defaultdict(partial(array, "q"))
        self.counts: Counter[str] = Counter()
        self.tables: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._seen: set[bytes] = set()

    def count(self, records: Iterable[Any]) -> Self:
        for record in records:
            self.num_records += 1
            self._seen.add(content_hash(record))
            for text in texts_of(record):
                self.characters.update(text)
            self.add(record)
        return self

    @abstractmethod
    def add(self, record: Any) -> None: ...

    @property
    def num_duplicates(self) -> int:
        """Records identical to an earlier one (128-bit hashes)."""
        return self.num_records - len(self._seen)

    @property
    def num_bytes(self) -> int:
        """Size of the texts as UTF-8."""
        return sum(len(char.encode("utf-8", "surrogatepass")) * count for char, count in self.characters.items())

    @property
    def scripts(self) -> dict[str, float]:
        """The fraction of each script, of all characters that are not white space."""
        found = dict.fromkeys([*_SCRIPTS.values(), "other"], 0)
        for char, count in self.characters.items():
            if not char.isspace():
                found[_SCRIPTS.get(unicodedata.name(char, "").split(" ")[0], "other")] += count
        return {name: count / max(1, sum(found.values())) for name, count in found.items()}

    @property
    def estimated_tokens(self) -> int:
        """As of a tokenizer for both languages: 1.6 Chinese characters a token, and 4 bytes of anything else."""
        num_han = self._total(lambda char: unicodedata.name(char, "").startswith("CJK"))
        return round((self.num_bytes - 3 * num_han) / 4 + num_han / 1.6)

    def _total(self, is_counted: Callable[[str], bool]) -> int:
        return sum(count for char, count in self.characters.items() if is_counted(char))

    # --- the report

    def rows(self) -> Iterator[tuple[str, str]]:
        """What was counted, in words."""
        yield self.plural, f"{self.num_records:,}"
        yield "broken records", f"{self.bad_records.bad:,}"
        for reason, number in self.bad_records.reasons.most_common():
            yield "left out", f"{number:,}: {reason}"
        yield "exact duplicates", f"{self.num_duplicates:,}"
        scripts = [f"{name} {share * 100:.1f} %" for name, share in self.scripts.items() if share >= 0.0005]
        yield "languages, by script", ", ".join(scripts) or "none"
        yield "size", megabytes(self.num_bytes)
        for name, counts in self.tables.items():
            yield name, ", ".join(f"{key} {number:,}" for key, number in counts.most_common(NUM_FIELDS_NAMED))
        for name, number in self.counts.items():
            yield name, f"{number:,}"

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
    singular, plural = "text", "documents"

    def add(self, record: Document) -> None:
        self.lengths["document, bytes"].append(len(record.text.encode("utf-8", "surrogatepass")))

    def quality_warnings(self) -> Iterator[str]:
        lengths, num_bytes = quantiles(self.lengths["document, bytes"]), self.num_bytes
        if self.num_records < 20:
            yield f"Only {self.num_records} documents: too few to hold some out; cut them or add more."
        elif lengths["max"] > 0.2 * num_bytes:
            yield f"One document is {_share(lengths['max'], num_bytes)} of all bytes: a split by document is uneven."
        if num_bytes < 1_000_000:
            yield f"Only {num_bytes / 1e6:.2f} MB of text: a model memorizes it in a few epochs."
        yield from super().quality_warnings()
        if (median := lengths["p50"]) < 50:
            yield f"Half of the documents are {median} bytes or less: too short to teach anything beyond a phrase."
        yield from self._character_warnings()

    def _character_warnings(self) -> Iterator[str]:
        counts = self.characters
        if number := counts["\ufffd"]:
            yield f"{number} replacement characters (U+FFFD): some text was once decoded wrongly."
        if number := self._total(lambda char: unicodedata.category(char) == "Cc" and char not in _WHITE_CONTROLS):
            yield f"{number} control characters: perhaps binary data or terminal colours."
        if number := counts["\r"]:
            yield f"{number} carriage returns: line ends of another system, which cost tokens."
        if (number := counts["\u3000"]) > 0.005 * counts.total():
            yield f"{number} full-width spaces: indents of novels, which cost tokens."


class ChatStats(Stats):
    """Chats. Answers are assistant turns; a turn is any message but the system's."""

    singular, plural = "chat", "chats"

    def add(self, record: Chat) -> None:
        roles = [message.role for message in record.messages]
        turns = [role for role in roles if role != "system"]
        self.tables["messages by role"].update(roles)
        self.lengths["conversation, messages"].append(len(turns))
        answers = (message for message in record.messages if message.role == "assistant")
        self.lengths["answer, bytes"].extend(_num_bytes([answer]) for answer in answers)
        self.counts["tool calls"] += sum(len(message.tool_calls) for message in record.messages)
        self.counts["with reasoning"] += any(message.reasoning_content for message in record.messages)
        self.counts["with a system message"] += "system" in roles
        self.counts["with tools"] += bool(record.tools)
        self.counts["without an answer at the end"] += turns[-1:] != ["assistant"]

    def rows(self) -> Iterator[tuple[str, str]]:
        yield from super().rows()
        yield "size of answers", megabytes(sum(self.lengths["answer, bytes"]))

    def quality_warnings(self) -> Iterator[str]:
        yield from super().quality_warnings()
        if (number := self.counts["without an answer at the end"]) >= 0.01 * self.num_records:
            yield f"{_share(number, self.num_records)} of chats end on a turn that is never answered."
        if quantiles(self.lengths["conversation, messages"])["p95"] <= 2:
            yield "Nearly all chats are one question and one answer: the model will not learn to follow up."


class PreferenceStats(Stats):
    """Pairs of answers, and single labelled answers, which count as chosen (true) or rejected (false). The prompt is
    everything before the answer."""

    singular, plural = "preference", "records"

    @property
    def estimated_tokens(self) -> int:  # a pair's prompt counts once
        return round(super().estimated_tokens * sum(map(sum, self.lengths.values())) / max(1, self.num_bytes))

    def add(self, record: PreferenceRecord) -> None:
        sizes = [_num_bytes(chat.messages[-1:]) for chat in record.chats]
        self.lengths["prompt, bytes"].append(_num_bytes(record.chats[0].messages[:-1]))
        for size, is_chosen in zip(sizes, record.is_chosen, strict=True):
            self.lengths["chosen, bytes" if is_chosen else "rejected, bytes"].append(size)
        is_pair = len(sizes) == 2
        self.counts["pairs"] += is_pair
        self.counts["single rated answers"] += not is_pair
        self.counts["pairs whose chosen answer is longer"] += is_pair and sizes[0] > sizes[1]

    def quality_warnings(self) -> Iterator[str]:
        yield from super().quality_warnings()
        pairs, longer = self.counts["pairs"], self.counts["pairs whose chosen answer is longer"]
        if longer > 0.8 * pairs:
            share = _share(longer, pairs)
            yield f"The chosen answer is the longer one in {share} of pairs: a model may learn to be long."


class PromptStats(Stats):
    """Prompts, which may have further fields, such as a reference answer."""

    singular, plural = "prompt", "prompts"

    def add(self, record: Chat) -> None:
        roles = [message.role for message in record.messages]
        self.lengths["prompt, messages"].append(sum(role != "system" for role in roles))
        self.lengths["prompt, bytes"].append(_num_bytes(record.messages))
        self.tables["other fields"].update(str(name) for name in record.fields if name not in CHAT_FIELDS)
        self.counts["with a system message"] += "system" in roles
        self.counts["with tools"] += bool(record.tools)


STATS: dict[Kind, type[Stats]] = {
    "documents": DocumentStats,
    "chats": ChatStats,
    "preferences": PreferenceStats,
    "prompts": PromptStats,
}


def _share(part: float, total: float) -> str:
    """A fraction in per cent: without decimals, or with one below 1 %."""
    percent = 100 * part / total
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
