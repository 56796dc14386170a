"""The scan of a text: the same numbers in C and in Python, whatever the text."""

import random
import time
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penjing.data.clean import text_scan
from penjing.data.clean.text_scan import Flag, Scan, scan, scan_in_python

pytestmark = pytest.mark.skipif(text_scan.c_library() is None, reason="no C compiler")

# Characters at the borders of all classes and flags.
CODES = """
    0 8 9 13 31 32 0x2D 0x30 0x39 0x3A 0x40 0x41 0x5A 0x61 0x7A 0x7F 0x80 0x85 0x9F 0xA0 0xAD 0xC0 0xC2 0xD7 0xF4
    0xF7 0x24F 0x250 0x370 0x402 0x432 0x1100 0x1680 0x1E00 0x1FFF 0x2000 0x200A 0x200B 0x2013 0x2019 0x2028
    0x203A 0x205F 0x2060 0x20AC 0x2122 0x221A 0x2C00 0x3000 0x3001 0x3007 0x3041 0x3097 0x30A1 0x30FB 0x3130
    0x3400 0x4DBF 0x4E00 0x951B 0x9286 0x9FFF 0xA000 0xABFF 0xAC00 0xD7A3 0xD800 0xDFFF 0xE000 0xF900 0xFB00
    0xFE30 0xFEFF 0xFF01 0xFF10 0xFF19 0xFF20 0xFF21 0xFF66 0xFFFD 0x10000 0x1D400 0x1F600 0x20000 0x3FFFF 0x40000
    0x10FFFF 0x300 0x2001 0x20CF 0x3029 0x309A 0xFF9D
"""
BORDERS = [chr(min(max(int(code, 0) + step, 0), 0x10FFFF)) for code in CODES.split() for step in (-1, 0, 1)]
PIECES = [
    *("the", "and", " ", "\n", "a b c d e f ", "1.2.3.4", "fe80::1", "sk-a1b2c3d4e5f6", "a@b", "的", "了一", "<p>"),
    *(
        "aaaaaaaaaa",
        "   x",
        "12-34 56",
        "x" * 41,
        "Ã¨",
        "Cookies",
        "about\\n",
        "@",
        "＠",
        "注册",
        "©",
        "éPrivacy",
        "锛銆",
        "「",
        "□",
        ";",
    ),
]


def equal(text):
    got, wanted = scan(text), scan_in_python(text)
    assert got == wanted, {name: (a, b) for name, a, b in zip(Scan._fields, got, wanted, strict=True) if a != b}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(BORDERS), st.text(max_size=3))).map("".join))
@example("")
@example("\n")
def test_c_and_python_agree_on_random_texts(text):
    equal(text)


@pytest.mark.parametrize("seed", range(6))
def test_c_and_python_agree_on_long_repetitive_texts(seed):
    rng = random.Random(seed)
    words = [rng.choice(["alpha", "beta", "的", "一", "x1", "\n", "."]) for _ in range(3000)]
    phrases = [words[start : start + rng.randint(1, 15)] for start in rng.sample(range(2900), 40)]
    equal(" ".join([word for _ in range(200) for word in rng.choice(phrases)] + words))
    equal("".join(rng.choice(BORDERS + PIECES) for _ in range(2000)))


def test_what_the_numbers_say():
    text = "One line, the first one.\n  indented\none two three four five six\none two three four five six\n中文的字"
    counts = scan(text)
    assert (counts.han, counts.lines, counts.closed_lines, counts.duplicate_chars) == (4, 5, 2, 27)
    assert counts.stop_words == 2 and counts.words == 5 + 1 + 12 + 4
    repeated = len("onetwothreefourfivesix")
    assert (counts.duplicate_5, counts.duplicate_6, counts.duplicate_7) == (repeated, repeated, 0)
    assert counts.top_4 == 2 * len("threefourfivesix") and counts.top_2 == 2 * len("threefour")


def test_lost_characters_do_not_repeat():
    text = "□□□□□□□。\n" * 9
    equal(text)
    assert scan(text).han == 63 and scan(text).duplicate_5 == scan(text).top_2 == 0


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("a\x00b", Flag.INVISIBLE), ("a\r\nb", Flag.INVISIBLE), ("crÃ¨me", Flag.MOJIBAKE),
        ("浣犲ソ锛屼笘鐣岋紝", Flag.MOJIBAKE),
        ("Privacy", Flag.BOILERPLATE), ("登录", Flag.BOILERPLATE),
        ("e\u0301", Flag.MARK), ("\u212b", Flag.MARK), ("が ガ Ａ ﾊ 가", Flag.MARK), ("ガ Ａ ﾊ ㎏ é …", 0),
        ("a@b.c", Flag.MAIL), ("010-1234 567", Flag.NUMBER), ("at 1.2.3.4", Flag.NUMBER),
        ("AKIAIOSFODNN7EXAMPLE", Flag.KEY),
        ("fe80::1", Flag.IPV6), ("1:2:3:4:5:6:7:8", Flag.IPV6),
        ("café, déjà vu — “naïve”\n12:30:45 in 2024. x86-64 第十二回", 0),
    ],
)  # fmt: skip
def test_flags(text, flag):
    assert scan(text).flags == flag


def test_what_nfc_may_change_is_marked():
    unmarked = [char for char in map(chr, range(0x30000)) if not scan(char).flags & Flag.MARK]
    parts = [unicodedata.decomposition(chr(code)).split() for code in range(0x30000)]
    second = {chr(int(part[1], 16)) for part in parts if len(part) == 2 and part[0][0] != "<"}  # of a pair that is one
    assert not any(unicodedata.combining(char) or char in second for char in unmarked)
    assert unicodedata.is_normalized("NFC", "".join(unmarked)) and len(unmarked) > 22_000


def test_without_a_compiler_python_does_it_and_it_is_said_once(monkeypatch):
    monkeypatch.setenv("PENJING_KERNELS", "off")
    text_scan.c_library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="off") as said:
            got = [scan(f"some text, number {number}\n") for number in range(3)]
    finally:
        monkeypatch.undo()
        text_scan.c_library.cache_clear()
        scan.cache_clear()
    assert len(said) == 1 and got == [scan(f"some text, number {number}\n") for number in range(3)]


@pytest.mark.parametrize("text", ["的" * 300_000, "word " * 300_000, "\n" * 300_000, "a\n" * 300_000, "<" * 300_000])
def test_long_texts_take_bounded_time(text):
    begin = time.process_time()
    scan(text)
    assert time.process_time() - begin < 2
