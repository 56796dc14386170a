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
class DatasetStats:
    """Figures of a corpus of documents. Fractions of scripts are of all characters that are not white space."""

    num_documents: int
    num_broken: int  # records that cannot be read
    left_out: dict[str, int]  # records with nothing to learn from, by reason
    num_bytes: int  # as UTF-8
    num_characters: int
    han_fraction: float
    latin_fraction: float
    digit_fraction: float
    other_fraction: float
    length_bytes: dict[str, int]  # quantiles of the documents' lengths
    lengths_exact: bool  # False: from a uniform sample of a million documents (min and max are always exact)
    num_duplicates: int  # documents that are byte for byte some earlier one (64-bit hashes)
    duplicate_fraction: float
    num_distinct_characters: int
    common_characters: tuple[tuple[str, int], ...]  # most frequent first, white space left out
    longest_lines: tuple[LongLine, ...]  # longest first
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatStats:
    """Figures of a set of chats. Answers are assistant turns; a turn is any message but the system's."""

    num_chats: int
    num_broken: int  # records that cannot be read
    left_out: dict[str, int]  # chats with nothing to learn from, by reason
    num_answers: int
    num_answer_bytes: int
    roles: dict[str, int]  # messages by role
    turns_per_chat: dict[str, int]  # quantiles
    answer_bytes: dict[str, int]  # quantiles
    lengths_exact: bool
    num_with_system: int
    num_with_tools: int
    num_with_reasoning: int
    num_tool_calls: int
    num_duplicates: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceStats:
    """Figures of pairs of answers and of single judged ones. Chosen are the wanted answers, rejected the others."""

    num_pairs: int
    num_judged: int  # single answers
    num_broken: int  # records that cannot be read
    left_out: dict[str, int]  # records with nothing to learn from, by reason: pairs of equal answers among them
    prompt_bytes: dict[str, int]  # quantiles, of all that comes before the answer
    chosen_bytes: dict[str, int]  # quantiles
    rejected_bytes: dict[str, int]  # quantiles
    lengths_exact: bool
    chosen_longer_fraction: float  # of the pairs; 0.5 is no bias towards length
    num_duplicates: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptStats:
    """Figures of conversations that wait for an answer."""

    num_prompts: int
    num_broken: int  # records that cannot be read
    turns_per_prompt: dict[str, int]  # quantiles
    prompt_bytes: dict[str, int]  # quantiles
    lengths_exact: bool
    num_with_system: int
    num_with_tools: int
    fields: dict[str, int]  # records that have a further field, reference answers among them
    num_duplicates: int
    warnings: tuple[str, ...]
