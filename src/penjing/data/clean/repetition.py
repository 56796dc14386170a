"""Leave out documents that repeat themselves, by Gopher's measures (arXiv:2112.11446, table A1).

An n-gram has n words, and each Chinese character is a word here. So FineWeb-2's limits for Chinese words
(arXiv:2506.20920, cmn_Hani), of 1.6 characters on average, hold for n-grams of so many characters more.
"""

from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter

from penjing.base.config import Fraction, NonNegativeInt
from penjing.data.clean.quality import DocumentRule, by_language, first_above, is_code
from penjing.data.clean.rule import RuleSettings
from penjing.data.clean.text_scan import Scan


@dataclass(frozen=True, kw_only=True)
class Limits(RuleSettings):
    """Shares of a document's characters; 1 = no limit."""

    min_words: NonNegativeInt = 200  # shorter documents, such as songs, and code need only keep the limit of `loose`
    loose: Fraction = 0.62  # in 10-grams that occurred before
    lines: Fraction = 0.3  # in lines that occurred before
    top_2: Fraction = 0.2  # in the most frequent 2-gram
    top_3: Fraction = 0.18
    top_4: Fraction = 0.16
    duplicate_5: Fraction = 0.15  # in 5-grams that occurred before
    duplicate_6: Fraction = 0.14
    duplicate_7: Fraction = 0.13
    duplicate_8: Fraction = 0.12
    duplicate_9: Fraction = 0.11
    duplicate_10: Fraction = 0.1


class Repetition(DocumentRule):
    settings_type = by_language(
        Limits, min_words=700, lines=0.287, top_2=1.0, top_3=0.256, top_4=0.201, duplicate_5=1.0, duplicate_6=1.0,
        duplicate_7=1.0, duplicate_8=0.198, duplicate_9=0.19, duplicate_10=0.182,
    )  # fmt: skip

    def judge(self, text: str, counts: Scan) -> str | None:
        limits, chars = self.limits(counts), counts.ngram_chars
        if counts.words < limits.min_words or is_code(counts):
            return first_above([("repeated 10-grams", counts.duplicate_10, chars, limits.loose)])
        lines = ("repeated lines", counts.duplicate_chars, counts.line_chars, limits.lines)
        return first_above([lines, *zip(_NGRAMS.values(), _shares(counts), repeat(chars), _shares(limits))])


_NGRAMS = {f"top_{n}": f"a frequent {n}-gram" for n in range(2, 5)}
_NGRAMS |= {f"duplicate_{n}": f"repeated {n}-grams" for n in range(5, 11)}
_shares = attrgetter(*_NGRAMS)  # of counts, and of limits
