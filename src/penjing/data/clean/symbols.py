"""Leave out documents of symbols, numbers, or codes instead of words."""

from dataclasses import dataclass

from penjing.base.config import Fraction, NonNegativeInt, PositiveFloat
from penjing.data.clean.quality import DocumentRule, by_language, first_above
from penjing.data.clean.rule import Dropped, RuleSettings
from penjing.data.clean.text_scan import Scan


@dataclass(frozen=True, kw_only=True)
class Limits(RuleSettings):
    min_chars: NonNegativeInt = 40  # shorter documents are kept
    no_letters: Fraction = 0.6  # share of characters that are neither letters nor digits; code has some 0.3
    no_words: Fraction = 0.6  # share of words without a letter, such as numbers
    long_words: Fraction = 0.4  # share of characters in words of more than 40, such as base64
    repeated_chars: Fraction = 0.2  # share of characters that follow eight equal ones
    min_word_length: PositiveFloat = 2.0  # mean; texts with a space after each letter are below
    max_word_length: PositiveFloat = 12.0


class Symbols(DocumentRule):
    settings_type = by_language(Limits, min_word_length=1.0, max_word_length=5.0)

    def judge(self, text: str, counts: Scan) -> str | None:
        limits = self.limits(counts)
        if counts.visible < limits.min_chars:
            return None
        no_letters = counts.symbols + counts.punctuation
        if dropped := first_above(
            [
                ("few letters", no_letters, counts.visible, limits.no_letters),
                ("few words", counts.words - counts.alpha_words, counts.words, limits.no_words),
                ("long words", counts.long_chars, counts.word_chars, limits.long_words),
                ("repeated characters", counts.same_char, counts.visible, limits.repeated_chars),
            ]
        ):
            return dropped
        length = counts.word_chars / counts.words
        if not limits.min_word_length <= length <= limits.max_word_length:
            return Dropped(
                "unusual words",
                f"mean length {length:.1f}, from {limits.min_word_length:g} to {limits.max_word_length:g}",
            )
        return None
