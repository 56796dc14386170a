"""One form of each character: NFC, LF as the end of a line, no control and zero-width characters."""

import re
import unicodedata

from penjing.data.clean.rule import TextRule
from penjing.data.clean.text_scan import Flag, scan

_LINE_ENDS = re.compile("\r\n?|[\x85\u2028\u2029]")
# Control characters but tab and LF; soft hyphen; zero-width space, word joiner, byte order mark. Joiners (U+200C,
# U+200D) stay: emoji, Persian and Indian scripts need them.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u2060\ufeff]")


class Unicode(TextRule):
    """Changes nothing that a reader sees."""

    def text(self, text: str) -> str:
        flags = scan(text).flags
        if flags & Flag.INVISIBLE:
            text = _INVISIBLE.sub("", _LINE_ENDS.sub("\n", text))
        is_nfc = not flags & Flag.MARK or unicodedata.is_normalized("NFC", text)
        return text if is_nfc else unicodedata.normalize("NFC", text)
