"""Leave out documents that are too short, or too long, to be a text."""

from dataclasses import dataclass

from penjing.base.config import NonNegativeInt
from penjing.data.clean.quality import DocumentRule, by_language
from penjing.data.clean.rule import Dropped, RuleSettings
from penjing.data.clean.text_scan import Scan


@dataclass(frozen=True, kw_only=True)
class Limits(RuleSettings):
    min_letters: NonNegativeInt = 10  # letters and digits
    max_chars: NonNegativeInt = 0  # that are no spaces; 0 = any number


class Length(DocumentRule):
    settings_type = by_language(Limits, min_letters=2)

    def judge(self, text: str, counts: Scan) -> str | None:
        limits = self.limits(counts)
        letters = counts.letters + counts.digits
        if letters < limits.min_letters:
            return Dropped("too short", f"{letters} letters, at least {limits.min_letters}")
        if limits.max_chars and counts.visible > limits.max_chars:
            return Dropped("too long", f"{counts.visible} characters, at most {limits.max_chars}")
        return None
