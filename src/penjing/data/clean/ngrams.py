"""Hashes of words and of n-grams, and sketches for near duplicates: in C (text_scan.c); without a compiler in Python.

Of scripts without spaces each character is a word.
"""

import random
from array import array
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penjing.data.clean.text_scan import c_library

Hashes = NDArray[np.uint64]

NUM_PERMUTATIONS, NUM_BANDS = 256, 32
_FACTOR, _OFFSET, _MIX = 0x9E3779B97F4A7C15, 0x9E37, 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
# Thai to Burmese, Khmer, then all from the CJK radicals to before Hangul, CJK compatibility, and full-width forms
_UNSPACED = ((0x0E00, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xABFF), (0xF900, 0xFAFF), (0xFF01, 0xFF65))
_SEPARATOR, _IN_WORD, _ALONE = 0, 1, 2  # characters beyond the basic plane are words


@cache
def _table(marks: bool) -> "array[int]":
    """Of each character of the basic plane the lower case, and what it is of a word in the highest byte."""
    chars = list(map(chr, range(65536)))
    kinds = np.array([not char.isspace() if marks else char.isalnum() for char in chars], np.uint32)
    for first, last in _UNSPACED:
        kinds[first : last + 1] *= _ALONE
    lower = np.array([ord(char.lower()[0]) for char in chars], np.uint32)
    return array("I", (kinds << np.uint32(24) | lower).tobytes())


@cache
def _functions() -> "array[int]":
    """Odd factors of all permutations, then offsets."""
    bits = random.Random(42).getrandbits
    return array("I", [bits(32) | (place < NUM_PERMUTATIONS) for place in range(2 * NUM_PERMUTATIONS)])


def _mix(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ hashes >> np.uint64(32)) * np.uint64(_MIX)
    return hashes ^ hashes >> np.uint64(32)


def word_hashes(text: str, *, marks: bool) -> Hashes:
    """Case does not count. Spaces separate words; without marks all else but letters and digits does too."""
    table, library = _table(marks), c_library()
    if library is not None:
        content = text.encode("utf-8", "surrogatepass")
        words = np.empty(len(content) // 2 + 1, np.uint64)
        return words[: library.words(content, len(content), table.buffer_info()[0], words.ctypes.data)]
    hashes, is_open = list[int](), False
    for code in map(ord, text):
        entry = table[code] if code < len(table) else _ALONE << 24 | code
        kind = entry >> 24
        if kind != _SEPARATOR:
            if kind == _ALONE or not is_open:
                hashes.append(0)
            hashes[-1] = ((hashes[-1] ^ entry & 0xFFFFFF) * _FACTOR + _OFFSET) & _MASK
        is_open = kind == _IN_WORD
    return _mix(np.array(hashes, np.uint64))


def ngram_hashes(words: Hashes, n: int) -> Hashes:
    """The hash of the n words from each word on; of the last n - 1 there is none."""
    if n == 1 or len(words) < n:
        return words[: max(0, len(words) - n + 1)]
    left, right = ngram_hashes(words, n - n // 2), ngram_hashes(words, n // 2)
    num = len(words) - n + 1
    return left[:num] * np.uint64(pow(_FACTOR, n // 2, 1 << 64)) + right[n - n // 2 :][:num]


def sketch(text: str, n: int) -> bytes:
    """Of a text the keys of its bands, then its distinct shingles of n words, shortened to 32 bits, in order.

    Texts whose MinHash is equal in a band have the key of this band in common. A text of fewer words has one shingle,
    of all its words; of one without words the sketch is empty.
    """
    library = c_library()
    if library is not None:
        content = text.encode("utf-8", "surrogatepass")
        out = array("I", bytes(8 * NUM_BANDS + 4 * (len(content) // 2 + 1)))
        classes, functions, place = (each.buffer_info()[0] for each in (_table(True), _functions(), out))
        found = library.sketch(content, len(content), classes, n, functions, place)
        if found < 0:
            raise MemoryError("while a text was sketched")
        return out[: 2 * NUM_BANDS + found].tobytes() if found else b""
    words = word_hashes(text, marks=True)
    if not len(words):
        return b""
    shingles = (_mix(ngram_hashes(words, min(n, len(words)))) >> np.uint64(32)).astype(np.uint32)
    distinct = np.array(list(dict.fromkeys(np.maximum(shingles, 1).tolist())), np.uint32)
    pairs = np.array(_functions(), np.uint32).reshape(2, -1).T
    least = np.array([(distinct * factor + offset).min() for factor, offset in pairs], np.uint64)
    keys = np.arange(NUM_BANDS, dtype=np.uint64)
    for minima in least.reshape(NUM_BANDS, -1).T:
        keys = (keys ^ minima) * np.uint64(_FACTOR) + np.uint64(_OFFSET)
    return _mix(keys).tobytes() + distinct.tobytes()
