"""Convert traditional Chinese characters to simplified ones. An option: classical texts should stay as they are."""

from typing import Any

from penjing.data.clean.rule import RuleSettings, TextRule
from penjing.data.clean.text_scan import scan


class Simplified(TextRule):
    """By opencc (t2s). The report counts the records that it changes."""

    package = "opencc"

    def __init__(self, settings: RuleSettings | None = None) -> None:
        super().__init__(settings)
        from opencc import OpenCC

        self._convert: Any = OpenCC("t2s").convert

    def text(self, text: str) -> str:
        return str(self._convert(text)) if scan(text).han else text
