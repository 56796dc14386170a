"""Keep texts of some languages: by script, by function words, then by py3langid among languages in Latin letters."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from penjing.base.config import Fraction
from penjing.data.clean.quality import DocumentRule
from penjing.data.clean.rule import Dropped, RuleSettings
from penjing.data.clean.text_scan import Scan

_LATIN = "af ca cs da de en es et fi fr hr hu id it lt lv ms nl no pl pt ro sk sl sv sw tl tr vi"
_OF_SCRIPT = {"Chinese": "zh", "Japanese": "ja", "Korean": "ko"}
_MIN_LETTERS = 40  # of which a language can be told
_SAMPLE = 400  # characters that are classified


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(RuleSettings):
    keep: tuple[str, ...] = ("en", "zh")  # ISO 639-1 codes
    min_probability: Fraction = 0.9  # of another language; texts that may be of one of these are kept


class Language(DocumentRule):
    """Texts without a clear language pass: short ones, lists of names, code."""

    settings_type = LanguageSettings
    settings: LanguageSettings
    package = "py3langid"

    def judge(self, text: str, counts: Scan) -> str | None:
        language, probability = _language_of(text, counts)
        if not language or language in self.settings.keep or probability < self.settings.min_probability:
            return None
        return Dropped("another language", f"{language}, probability {probability:.2f}")


def script_of(counts: Scan) -> str:
    """The script of most of a text: Chinese, Japanese, Korean, Latin, or other."""
    if 3 * (counts.han + counts.kana) > max(counts.words, 1):
        return "Japanese" if counts.kana >= 5 and counts.kana > 0.1 * (counts.kana + counts.han) else "Chinese"
    if counts.hangul > 0.3 * counts.letters:
        return "Korean"
    return "Latin" if counts.latin > 0.5 * counts.letters else "other"


def _language_of(text: str, counts: Scan) -> tuple[str, float]:
    """The code of the language and its probability; empty if it cannot be told."""
    script = script_of(counts)
    if script in _OF_SCRIPT:
        return _OF_SCRIPT[script], 1.0
    if script == "Latin" and 25 * counts.stop_words > counts.words:
        return "en", 1.0
    if counts.letters < _MIN_LETTERS or counts.words <= 1.3 * counts.lines:
        return "", 0.0
    middle = max(0, len(text) // 2 - _SAMPLE // 2)
    language, probability = _classifier(script == "Latin").classify(text[middle : middle + _SAMPLE])
    return str(language), float(probability)


@cache
def _classifier(is_latin: bool) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    classifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if is_latin:
        classifier.set_languages([code for code in _LATIN.split() if code in classifier.nb_classes])
    return classifier
