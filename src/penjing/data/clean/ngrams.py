"""Hashes of n-grams of words, for many texts at once in numpy. Of scripts without spaces each character is a word."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_BLOCK_CHARACTERS = 1 << 16  # hashed at once: they stay in the cache
_LONGEST_WORD = 1 << 10  # a longer one may be cut
_FACTOR = 0x9FB21C651E98DF25
_INVERSE = pow(_FACTOR, -1, 1 << 64)
# Thai to Burmese, Khmer, then all from the CJK radicals to before Hangul, CJK compatibility, and full-width forms
_UNSPACED = ((0x0E00, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xABFF), (0xF900, 0xFAFF), (0xFF01, 0xFF65))
_SEPARATOR, _IN_WORD, _ALONE = 0, 1, 2


@cache
def _classes(marks: bool) -> NDArray[np.int8]:
    """Of each character of the basic plane, and of all others: none of a word, part of a word, or a word itself."""
    classes = np.full(65537, _ALONE, np.int8)
    classes[:65536] = [not chr(code).isspace() if marks else chr(code).isalnum() for code in range(65536)]
    for first, last in _UNSPACED:
        classes[first : last + 1] *= _ALONE
    return classes


@cache
def _powers(base: int) -> Hashes:
    """base^0, base^1, ... modulo 2^64, for the characters of a block."""
    powers = np.full(_BLOCK_CHARACTERS, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def mix(hashes: Hashes) -> Hashes:
    """Spread each bit over all others (the finalizer of MurmurHash3), in place."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes ^= hashes >> np.uint64(33)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(33)
    return hashes


def word_hashes(texts: Sequence[str], *, marks: bool) -> tuple[Hashes, NDArray[np.int64]]:
    """(hashes of the words of all texts, where each text begins and ends among them). Case does not count.

    Spaces separate words; without marks all else but letters and digits does too.
    """
    lowered: Sequence[str] = texts
    joined = "\n".join(texts)
    if len(joined.lower()) == len(joined):
        joined = joined.lower()
    else:  # a few letters become two
        lowered = [text.lower() for text in texts]
        joined = "\n".join(lowered)
    ends = np.cumsum([len(text) + 1 for text in lowered], dtype=np.int64)
    words, starts = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    first = 0
    while first < len(joined):
        end = first + _BLOCK_CHARACTERS
        if end < len(joined):  # not inside a word
            end = (
                max(joined.rfind(" ", end - _LONGEST_WORD, end), joined.rfind("\n", end - _LONGEST_WORD, end)) + 1
                or end
            )
        block, block_starts = _block_words(joined[first:end], _classes(marks))
        words.append(block)
        starts.append(block_starts + first)
        first = end
    return np.concatenate(words), np.searchsorted(np.concatenate(starts), np.concatenate(([0], ends)))


def _block_words(text: str, class_of: NDArray[np.int8]) -> tuple[Hashes, NDArray[np.int64]]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    classes = class_of[np.minimum(codes, 65536)]
    in_word = classes == _IN_WORD
    begins = classes == _ALONE
    begins[0] |= in_word[0]
    begins[1:] |= in_word[1:] & ~in_word[:-1]
    starts = np.flatnonzero(begins)
    if not len(starts):
        return np.zeros(0, np.uint64), starts
    if not in_word.any():  # each word is one character
        return mix(codes[starts].astype(np.uint64)), starts
    # The sum of character times power of its place, divided by the power of the word's first place
    values = codes * _powers(_FACTOR)[: len(codes)]
    values *= classes != _SEPARATOR
    return mix(np.add.reduceat(values, starts) * _powers(_INVERSE)[starts]), starts


def ngram_hashes(words: Hashes, n: int) -> Hashes:
    """The hash of the n words from each word on; of the last n - 1 there is none."""
    if n == 1 or len(words) < n:
        return words[: max(0, len(words) - n + 1)]
    left, right = ngram_hashes(words, n - n // 2), ngram_hashes(words, n // 2)
    num = len(words) - n + 1
    return left[:num] * np.uint64(pow(_FACTOR, n // 2, 1 << 64)) + right[n - n // 2 :][:num]


def shingles(texts: Sequence[str], n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """(hashes of n words in sequence, bounds of each text). A text of fewer words has one, of all its words."""
    words, bounds = word_hashes(texts, marks=True)
    hashes = mix(ngram_hashes(words, n).copy())
    lengths = np.diff(bounds)
    num_of_text = np.where(lengths >= n, lengths - n + 1, np.minimum(lengths, 1))
    new_bounds = np.concatenate(([0], np.cumsum(num_of_text)))
    # From place in the result to place among the words: the n - 1 words at the end of each text begin no shingle.
    places = np.arange(new_bounds[-1]) + np.repeat(bounds[:-1] - new_bounds[:-1], num_of_text)
    found = np.zeros(len(places), np.uint64)
    is_whole = np.repeat(lengths >= n, num_of_text)
    found[is_whole] = hashes[places[is_whole]]
    for text in np.flatnonzero((lengths > 0) & (lengths < n)):
        found[new_bounds[text]] = mix(ngram_hashes(words[bounds[text] : bounds[text + 1]], int(lengths[text])).copy())[
            0
        ]
    return found, new_bounds
