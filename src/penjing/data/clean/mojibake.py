"""Repair texts that were decoded with a wrong encoding; leave out what is broken beyond repair."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from penjing.base.config import Fraction
from penjing.data.clean.quality import needs
from penjing.data.clean.rule import Dropped, Record, Rule, RuleSettings, map_texts, texts_of
from penjing.data.clean.text_scan import Flag, scan

_BROKEN = re.compile("\ufffd|锟斤拷|锟斤|烫烫烫|屯屯屯")  # what is left of bytes that were no text
_HIGH_LATIN = re.compile("[\xa0-\xff\u2018-\u203a\u20ac]")
_CUT_QUOTE = re.compile(r"â€(?=\s|$)")
_HAN = re.compile("[\u4e00-\u9fff]")


@dataclass(frozen=True, kw_only=True)
class MojibakeSettings(RuleSettings):
    section: ClassVar = "rules.mojibake"

    max_broken: Fraction = 0.05  # share of broken characters such as U+FFFD in what cannot be repaired


class Mojibake(Rule):
    """By ftfy, whose other changes (widths, quotation marks, entities, normal forms) are off; and two of Chinese."""

    settings_type = MojibakeSettings
    settings: MojibakeSettings

    def __init__(self, settings: RuleSettings | None = None) -> None:
        super().__init__(settings)
        needs("ftfy")

    def __call__(self, record: Record) -> Record | str:
        repaired: Record = map_texts(record, repair)
        for text in texts_of(repaired):
            if "\ufffd" in text or "锟斤" in text or "烫烫烫" in text or "屯屯屯" in text:
                share = sum(len(broken) for broken in _BROKEN.findall(text)) / len(text)
                if share > self.settings.max_broken:
                    return Dropped("broken characters", f"{share:.3f}, at most {self.settings.max_broken:g}")
        return repaired


def repair(text: str) -> str:
    if not scan(text).flags & Flag.MOJIBAKE:
        return text
    fix, config = _ftfy()
    if "â€œ" in text:  # a closing quotation mark that lost its last byte, which cp1252 does not have
        text = _CUT_QUOTE.sub("”", text)
    fixed = str(fix(text, config))
    return "\n".join(_gbk_as_latin(_utf8_as_gbk(line)) for line in fixed.split("\n"))


@cache
def _ftfy() -> tuple[Any, Any]:
    import ftfy

    config = ftfy.TextFixerConfig(
        unescape_html=False,
        remove_terminal_escapes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        fix_surrogates=False,
        remove_control_chars=False,
        normalization=None,
    )
    return ftfy.fix_text, config


def _utf8_as_gbk(line: str) -> str:
    """UTF-8 that was read as GBK: the bytes of Chinese text are UTF-8 by chance only if there are few."""
    if len(_HAN.findall(line)) < 3:
        return line
    try:
        content = line.encode("gb18030")
        return content.decode("utf-8")
    except UnicodeEncodeError:
        return line
    except UnicodeDecodeError:  # of an odd number of bytes the last was lost
        if not scan(line).flags & Flag.MOJIBAKE:
            return line
        decoded = content.decode("utf-8", "replace")
        return decoded if decoded.count("\ufffd") < 0.2 * len(decoded) else line


def _gbk_as_latin(line: str) -> str:
    """GBK that was read as Latin-1 or cp1252: most characters are between U+00A0 and U+00FF, and GB2312 knows all."""
    if 10 * len(_HIGH_LATIN.findall(line)) < 6 * len(line.replace(" ", "")):
        return line
    for encoding in ("latin-1", "cp1252"):
        try:
            decoded = line.encode(encoding).decode("gb2312")
        except UnicodeError:
            continue
        if len(_HAN.findall(decoded)) >= 2:
            return decoded
    return line
