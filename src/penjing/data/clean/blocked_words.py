"""Leave out records with a word of the user's list."""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from penjing.base.files import read_parsed
from penjing.data.clean.rule import Dropped, Record, Rule, RuleSettings, texts_of

_WORD = re.compile("[a-z0-9_]+")


@dataclass(frozen=True, kw_only=True)
class BlockedWordsSettings(RuleSettings):
    file: str = ""  # one word or phrase a line; upper and lower case are one

    def files(self) -> tuple[str, ...]:
        return (self.file,)


class BlockedWords(Rule):
    """English words are found as whole words; phrases and words of other scripts anywhere."""

    settings_type = BlockedWordsSettings
    settings: BlockedWordsSettings

    def __init__(self, settings: RuleSettings | None = None) -> None:
        super().__init__(settings)
        lines = read_parsed(Path(self.settings.file), "text", str.splitlines)
        blocked = {line.strip().lower() for line in lines} - {""}
        self._words = {word for word in blocked if _WORD.fullmatch(word)}
        self._phrases: dict[str, list[str]] = defaultdict(list)  # by their first character
        for phrase in sorted(blocked - self._words):
            self._phrases[phrase[0]].append(phrase)

    def __call__(self, record: Record) -> Record | str:
        for text in texts_of(record):
            text = text.lower()
            found = next((word for word in _WORD.findall(text) if word in self._words), "") if self._words else ""
            starts = self._phrases.keys() & set(text)
            found = found or next((phrase for start in starts for phrase in self._phrases[start] if phrase in text), "")
            if found:
                return Dropped("a blocked word", found)
        return record
