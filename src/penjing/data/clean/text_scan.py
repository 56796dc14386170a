"""What the rules ask of a text, by one pass over it: what it may contain, counts of characters, words and lines, and
repetition. In C (text_scan.c); without a compiler the same in Python, some thirty times as slow."""

import ctypes
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from ctypes import c_char_p, c_int, c_long, c_void_p
from enum import IntEnum
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penjing.base.c_library import CLibrary, build

MAX_WORDS = 1 << 18  # repetition is measured in so many words and lines from the start


class Flag(IntEnum):  # of an IntFlag an `&` takes three microseconds
    """What a text may contain; without the flag it does not."""

    INVISIBLE = 1  # control and zero-width characters, other line ends than LF
    MOJIBAKE = 2
    MAIL = 4  # an at sign between letters
    NUMBER = 8  # seven digits close to each other, or three dots between digits
    KEY = 16  # 16 letters and digits in a row, or 20 letters
    IPV6 = 32
    BOILERPLATE = 64  # words that lines of web pages have
    MARK = 128  # characters that NFC may change


class Scan(NamedTuple):
    """Counts. A word is a run of letters and digits, or one character of Chinese and Japanese."""

    spaces: int
    punctuation: int
    symbols: int
    digits: int
    latin: int
    han: int
    kana: int
    hangul: int
    other: int  # letters of other scripts
    words: int
    word_chars: int
    long_chars: int  # characters in words of more than 40 Latin letters and digits
    alpha_words: int  # with a letter
    capital_words: int  # that begin with A to Z
    stop_words: int  # such as "the" and "的"
    lines: int  # that are not empty
    closed_lines: int  # that end in punctuation, or are indented
    line_chars: int
    duplicate_chars: int  # in lines that occurred before
    replaced: int  # U+FFFD
    tags: int  # `<` and a letter, `/` or `!`
    flags: int
    same_char: int  # from the ninth of equal characters in a row
    ngram_chars: int  # the length of all words in which n-grams are counted
    top_2: int  # characters in the n-gram of words that has most of them; 0 if none occurs twice
    top_3: int
    top_4: int
    duplicate_5: int  # characters in n-grams that occurred before
    duplicate_6: int
    duplicate_7: int
    duplicate_8: int
    duplicate_9: int
    duplicate_10: int
    letters: int
    visible: int  # characters that are no spaces


class _Library(CLibrary):
    FOLDER = Path(__file__).parent
    SOURCES = ("text_scan.c",)
    FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
    SIGNATURES: ClassVar = {
        "tables": (c_void_p, c_void_p, c_char_p, c_long),
        "scan": (c_char_p, c_long, c_void_p),
        "words": (c_char_p, c_long, c_void_p, c_void_p),
        "sketch": (c_char_p, c_long, c_void_p, c_long, c_void_p, c_void_p),
    }
    RETURNS: ClassVar = {"scan": c_int, "words": c_long, "sketch": c_long}


@cache
def c_library() -> _Library | None:
    built = "PENJING_KERNELS=off" if os.environ.get("PENJING_KERNELS") == "off" else build(_Library)
    if isinstance(built, str):
        warnings.warn(f"cleaning rules run in Python, some thirty times as slow as in C: {built}", stacklevel=4)
        return None
    keys = np.array(list(map(_number_of, _KNOWN)), np.uint64)
    built.tables(_characters().ctypes.data, keys.ctypes.data, bytes(_KNOWN.values()), len(keys))
    return built


@lru_cache(maxsize=2)  # several rules ask for one text; it may have megabytes
def scan(text: str) -> Scan:
    library = c_library()
    if library is None:
        return scan_in_python(text)
    content = text.encode("utf-8", "surrogatepass")
    numbers = (ctypes.c_int64 * len(Scan._fields))()
    if library.scan(content, len(content), numbers):
        raise MemoryError("while a text was scanned")
    return Scan._make(numbers[:])  # a list at once: four times as fast as number by number


# --- the tables of both -----------------------------------------------------------------------------------------------

# Ranges of code points of each class but symbols, in the order of Scan; the first that has a character counts.
_CLASSES = {
    "spaces": "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    "punctuation": "-.,;:!?'\"()\xa1\xab\xb7\xbb\xbf\u2010-\u205e\u3001-\u3003\u3008-\u3011\u3014-\u301f\u30fb"
    "\ufe30-\ufe4f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65",
    "symbols": "",
    "digits": "0-9\uff10-\uff19",
    "latin": "A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\u024f\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a",
    "han": "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\U00020000-\U0003ffff\u3007□",  # editors write □ for a lost one
    "kana": "\u3041-\u3096\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9d",
    "hangul": "\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f",
    "other": "\u0250-\u167f\u1681-\u1fff\u2c00-\u2dff\ua000-\uabff\ufb00-\ufdff\ufe70-\ufefc"
    "\U00010000-\U0001cfff\U0001d400-\U0001d7ff",
}
GBK_MARKS = "紝锛銆浜鐨鏄锟鈥"  # UTF-8 read as GBK: parts of punctuation and of frequent characters
# A byte of UTF-8 that starts a character of several bytes (LEAD), and one that continues it (TRAIL), as they look in
# cp1252, Mac Roman, cp437, cp1250, cp1251 and cp1257. After ANY_LEAD comes any character but those of tables.
_CLOSING, _STOP, _LEAD, _TRAIL, _ANY_LEAD, _ANY_TRAIL, _GBK_MARK = 16, 32, 64, 128, 1024, 2048, 4096
_BITS = {
    _CLOSING: ".,;:!?'\")]}>’”—…、。！），：；？\u300a-\u3011",
    _STOP: "的了是在不有和我他这就也都而以之其与为于乃曰者這與為於你们一",  # of modern and of classical Chinese
    _LEAD: "\xc2-\xf4\u0102\u0139\xac\u201a\u0393\u0413\u0420\u0421\u0432",
    _TRAIL: "\x80-\xbf\u0100-\u017f\u0192\u02c6\u02dc\u2013-\u203a\u20ac\u2122\u0402-\u040f\u0452-\u045f"
    "\xc7\xc4\xee\u2310\u2206\u2211\u222b\xf1",
    _ANY_LEAD: "\u0192\u221a\u2502-\u257f\u25ca",
    _ANY_TRAIL: "\x80-\u24ff\u2502-\u254f\u2551-\U0010ffff",
    _GBK_MARK: GBK_MARKS,
    Flag.INVISIBLE << 8: "\0-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u2060\ufeff\u2028\u2029",
    Flag.MOJIBAKE << 8: "\x80-\x84\x86-\x9f",
    Flag.BOILERPLATE << 8: "©",
    Flag.MARK << 8: "\u0300-\u2001\u20d0-\u2fff\u302a-\u309a\u3400-\u4dff\ua000-\ufeff\uff9e-\U0010ffff",
}
_STOP_WORD, _HINT, _WEAK_HINT = 1, 2, 3  # the last: in a short line without punctuation at its end
_WORDS = {  # of English the last eight letters count, of Chinese pairs of characters
    _STOP_WORD: "and the you his she that this with have they from what",
    _HINT: "cookie cookies javascript reserved privacy login subscribe newsletter copyright click ipsum sitemap "
    "advertisement 二维 公众 公网 扫码 点击 版权 登录 登陆",
    _WEAK_HINT: "facebook twitter menu contact about sign log top content posts articles comment reply terms "
    "share read more home skip related load register careers back blog support 上一 下一 会员 免责 全文 关于 分享 "
    "加入 友情 启用 喜欢 地图 开启 推荐 更多 本文 本站 本网 条款 注册 用户 相关 联系 评论 责任 返回 阅读 隐私 首页",
}
_KNOWN = {word[-8:]: kind for kind, words in _WORDS.items() for word in words.split()}


@cache
def _characters() -> NDArray[np.uint16]:
    """Of each character the number of its class, and its bits."""
    table = np.full(sys.maxunicode + 1, list(_CLASSES).index("symbols"), np.uint16)
    for number, ranges in reversed(list(enumerate(_CLASSES.values()))):
        for codes in _slices(ranges):
            table[codes] = number
    for bit, ranges in _BITS.items():
        for codes in _slices(ranges):
            table[codes] |= bit
    return table


def _slices(ranges: str) -> Iterator[slice]:
    for first, last in re.findall("(.)(?:-(.))?", ranges, re.DOTALL):
        yield slice(ord(first), ord(last or first) + 1)


def _number_of(known: str) -> int:
    """A word or a pair as a number."""
    return int.from_bytes(known.encode()) if known.isascii() else 1 << 63 | ord(known[0]) << 16 | ord(known[1])


# --- the same in Python -----------------------------------------------------------------------------------------------

_LETTER = "".join(ranges for name, ranges in _CLASSES.items() if name not in ("spaces", "punctuation"))  # or digit
_WORD = re.compile("[{han}{kana}]|[{digits}{latin}{hangul}{other}]+".format(**_CLASSES))
_LONG_WORD, _NUMERAL = (re.compile(each.format(**_CLASSES)) for each in ("[{digits}{latin}]{{41,}}", "[{digits}]+"))
_SPACES = "".join(filter(str.isspace, map(chr, [*range(9, 14), 32, *range(127, 0x3001)])))
_MAIL = re.compile(f"[{_LETTER}._%+-][@\uff20][{_LETTER}]")
_KEY = re.compile("[A-Za-z0-9_-]{20}|(?=[A-Za-z_-]*[0-9])(?=[0-9_-]*[A-Za-z])[A-Za-z0-9_-]{16}")
_NUMBER = re.compile(r"[0-9\uff10-\uff19](?:[-. ()/+]{0,2}[0-9\uff10-\uff19])*")
_ADDRESS = re.compile("[0-9A-Fa-f:]+")


def scan_in_python(text: str) -> Scan:
    """`scan` without a compiler."""
    entries = _characters()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    of_class = np.bincount(entries & 15, minlength=len(_CLASSES)).tolist()
    counts = Counter[str](dict(zip(_CLASSES, of_class, strict=True)))
    counts["letters"] = sum(counts[name] for name in ("latin", "han", "kana", "hangul", "other"))
    counts["visible"] = len(text) - counts["spaces"]
    words, lines = _WORD.findall(text), [line.strip(_SPACES) for line in text.split("\n")]
    stripped = [(line, raw[:1] != line[:1]) for line, raw in zip(lines, text.split("\n"), strict=True) if line]
    counts.update(
        words=len(words),
        word_chars=sum(map(len, words)),
        long_chars=sum(len(word) for word in words if _LONG_WORD.fullmatch(word)),
        alpha_words=sum(not _NUMERAL.fullmatch(word) for word in words),
        capital_words=sum("A" <= word[0] <= "Z" for word in words),
        stop_words=sum(word in _BITS[_STOP] or _KNOWN.get(_end(word)) == _STOP_WORD for word in words),
        lines=len(stripped),
        closed_lines=sum(indented or _is_closed(line) for line, indented in stripped),
        line_chars=sum(len(line) for line, _ in stripped),
        replaced=text.count("\ufffd"),
        tags=len(re.findall("<(?=[A-Za-z/!])", text)),
        flags=_flags(text, entries, [line for line, _ in stripped]),
        same_char=sum(
            max(0, len(run[0]) - 8)
            for run in re.finditer(r"(.)\1{8,}", text, re.DOTALL)
            if not re.match("[{spaces}{han}]".format(**_CLASSES), run[1])
        ),
    )
    seen: set[str] = set()
    for line, _ in stripped[:MAX_WORDS]:
        counts["duplicate_chars"] += len(line) if line in seen else 0
        seen.add(line)
    counts.update(_repetition(words[:MAX_WORDS]))
    return Scan._make(counts[name] for name in Scan._fields)


def _is_closed(line: str) -> bool:
    return bool(_characters()[ord(line[-1])] & _CLOSING)


def _end(word: str) -> str:
    return word[-8:].lower() if word[-8:].isascii() else word


def _known_in(text: str) -> set[int]:
    return {_KNOWN.get(each, 0) for each in (*map(_end, _WORD.findall(text)), *map("".join, pairwise(text)))}


def _flags(text: str, entries: NDArray[np.uint16], lines: Sequence[str]) -> int:
    flags = int(np.bitwise_or.reduce(entries)) >> 8 & (Flag.INVISIBLE | Flag.MOJIBAKE | Flag.BOILERPLATE | Flag.MARK)
    lead, trail = entries[:-1] & (_LEAD | _ANY_LEAD), entries[1:] & (_TRAIL | _ANY_TRAIL)
    is_pair = (lead & trail >> 1).any() or "\xc3 " in text  # a no-break space that became a space
    if is_pair or np.count_nonzero(entries & _GBK_MARK) > 1:
        flags |= Flag.MOJIBAKE
    short = [line for line in lines if len(line) <= 60 and not _is_closed(line)]
    if _HINT in _known_in(text) or any(_WEAK_HINT in _known_in(line) for line in short):
        flags |= Flag.BOILERPLATE
    flags |= (Flag.MAIL if _MAIL.search(text) else 0) | (Flag.KEY if _KEY.search(text) else 0)
    for run in _NUMBER.findall(text):
        digits = sum(char not in "-. ()/+" for char in run)
        if digits >= 7 or (digits >= 4 and run.count(".") >= 3):
            flags |= Flag.NUMBER
    for run in _ADDRESS.findall(text):
        colons = run.count(":")
        if colons < len(run) and (colons >= 7 or (colons >= 2 and "::" in run)):
            flags |= Flag.IPV6
    return flags


def _repetition(words: Sequence[str]) -> dict[str, int]:
    keys = [(at if word == "□" else -1, word) for at, word in enumerate(words)]  # a lost character is like no other
    before = [0, *accumulate(map(len, words))]
    found = {"ngram_chars": before[-1]}
    for n in range(2, 11):
        grams = [tuple(keys[i : i + n]) for i in range(len(words) - n + 1)]
        sizes = Counter(grams)
        if n < 5:
            most = max((sizes[g] * (before[i + n] - before[i]) for i, g in enumerate(grams) if sizes[g] > 1), default=0)
            found[f"top_{n}"] = min(most, before[-1])
            continue
        seen, covered = set[tuple[tuple[int, str], ...]](), set[int]()
        for i, gram in enumerate(grams):
            if gram in seen:
                covered.update(range(i, i + n))
            seen.add(gram)
        found[f"duplicate_{n}"] = sum(len(words[i]) for i in covered)
    return found
