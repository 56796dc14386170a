"""What `penjing data report` finds in each kind of data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LongLine:
    """A line and where its document starts."""

    num_characters: int
    source: str
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Figures of any kind of data. Those of lengths are quantiles by name."""

    num_broken: int  # records that cannot be read
    left_out: dict[str, int]  # records with nothing to learn from, by reason: pairs of equal answers among them
    lengths_exact: bool  # False: from a uniform sample of a million records (min and max are always exact)
    num_duplicates: int  # records that are byte for byte some earlier one (64-bit hashes)
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStats(Stats):
    """Figures of a corpus of documents. Fractions of scripts are of all characters that are not white space."""

    num_documents: int
    num_bytes: int  # as UTF-8
    num_characters: int
    han_fraction: float
    latin_fraction: float
    digit_fraction: float
    other_fraction: float
    length_bytes: dict[str, int]
    duplicate_fraction: float
    num_distinct_characters: int
    common_characters: tuple[tuple[str, int], ...]  # most frequent first, white space left out
    longest_lines: tuple[LongLine, ...]  # longest first


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatStats(Stats):
    """Figures of a set of chats. Answers are assistant turns; a turn is any message but the system's."""

    num_chats: int
    num_answers: int
    num_answer_bytes: int
    roles: dict[str, int]  # messages by role
    turns_per_chat: dict[str, int]
    answer_bytes: dict[str, int]
    num_with_system: int
    num_with_tools: int
    num_with_reasoning: int
    num_tool_calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceStats(Stats):
    """Figures of pairs of answers and of single judged ones. Chosen are the wanted answers, rejected the others."""

    num_pairs: int
    num_judged: int  # single answers
    prompt_bytes: dict[str, int]  # of all that comes before the answer
    chosen_bytes: dict[str, int]
    rejected_bytes: dict[str, int]
    chosen_longer_fraction: float  # of the pairs; 0.5 is no bias towards length


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStats(Stats):
    """Figures of conversations that wait for an answer."""

    num_prompts: int
    turns_per_prompt: dict[str, int]
    prompt_bytes: dict[str, int]
    num_with_system: int
    num_with_tools: int
    fields: dict[str, int]  # records that have a further field, reference answers among them
