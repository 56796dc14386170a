"""Repair texts that were decoded with a wrong encoding; leave out what is broken beyond repair."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from penjing.base.config import Fraction
from penjing.data.clean.rule import Dropped, Record, Rule, RuleSettings, map_texts, texts_of
from penjing.data.clean.text_scan import GBK_MARKS, Flag, scan

_BROKEN = re.compile(f"\ufffd|锟斤拷?|烫烫烫+|[{GBK_MARKS}]")  # what is left of bytes that were no text
_HIGH_LATIN = re.compile(
    "[\x80-\u02ff\u03a9\u03c0\u2018-\u201a\u201e\u2020-\u2025\u2030-\u22ff\u25ca\uf8ff\ufb01\ufb02]"
)
_NOT_REPAIRED = (  # settings of ftfy
    "unescape_html remove_terminal_escapes fix_latin_ligatures fix_character_width uncurl_quotes fix_line_breaks "
    "fix_surrogates remove_control_chars"
)
_CUT_QUOTE = re.compile(r"â€(?=\s|$)")
_HAN = re.compile("[\u4e00-\u9fff]")


@dataclass(frozen=True, kw_only=True)
class MojibakeSettings(RuleSettings):
    max_broken: Fraction = 0.05  # share of broken characters such as U+FFFD in what cannot be repaired


class Mojibake(Rule):
    """By ftfy, whose other changes (widths, quotation marks, entities, normal forms) are off; and two of Chinese."""

    settings_type = MojibakeSettings
    settings: MojibakeSettings
    package = "ftfy"

    def __call__(self, record: Record) -> Record | str:
        repaired: Record = map_texts(record, repair)
        for text in texts_of(repaired):
            counts = scan(text)
            if counts.replaced or counts.flags & Flag.MOJIBAKE or (counts.han and "烫烫烫" in text):
                share = sum(len(broken) for broken in _BROKEN.findall(text)) / len(text)
                if share > self.settings.max_broken:
                    return Dropped("broken characters", f"{share:.3f}, at most {self.settings.max_broken:g}")
        return repaired


def repair(text: str) -> str:
    if not scan(text).flags & Flag.MOJIBAKE:
        return text
    if "â€œ" in text:  # a closing quotation mark that lost its last byte, which cp1252 does not have
        text = _CUT_QUOTE.sub("”", text)
    fixed = "\n".join(map(_repair_line, text.split("\n")))
    if _HIGH_LATIN.search(fixed) and not _is_chinese(fixed) and (chinese := _chinese_as_latin(text, "gbk")) != text:
        return chinese
    return fixed


def _repair_line(line: str) -> str:
    if line.isascii():
        return line
    fixed = _chinese_as_latin(line, "utf-8")
    fix, config = _ftfy()
    return _utf8_as_gbk(str(fix(line, config)) if fixed == line else fixed)


@cache
def _ftfy() -> tuple[Any, Any]:
    import ftfy

    off: dict[str, Any] = dict.fromkeys(_NOT_REPAIRED.split(), False)
    return ftfy.fix_text, ftfy.TextFixerConfig(normalization=None, **off)


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


def _is_chinese(text: str) -> bool:
    """Whether characters such as ∶ are few beside Chinese ones."""
    return len(_HAN.findall(text)) > 20 * len(_HIGH_LATIN.findall(re.sub("[‘’]", "", text)))


def _chinese_as_latin(text: str, encoding: str) -> str:
    """Chinese text whose bytes were read as Latin letters: most characters are not ASCII, and become Chinese."""
    if 2 * len(_HIGH_LATIN.findall(text)) < len(re.sub(r"\s", "", text)):
        return text
    for read_as in ("latin-1", "cp1252", "mac-roman", "cp437"):
        try:
            decoded = text.encode(read_as).decode(encoding)
        except UnicodeError:
            continue
        if encoding == "utf-8":  # it may be so twice
            decoded = _chinese_as_latin(decoded, encoding)
        if _is_chinese(decoded):
            return decoded
    return text
