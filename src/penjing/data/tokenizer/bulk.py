"""Encode many texts fast: by gigatoken if it is installed and agrees with `tokenizers`, else by `tokenizers`."""

import random
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from penjing.data.tokenizer.tokenizer import Tokenizer

Ids = npt.NDArray[np.uint32]

# Its cache of words grows by about 4 MB for each MB of text without a repeated word, and version 0.10 never drops one.
RENEW_CHARACTERS = 32 << 20
CHECKED_CHARACTERS = 1024  # of a text that both encode, for about 1 % of the time
FIRST_CHECKED = 64  # texts of the first call; then one of each call
# What encoders may disagree about: composed characters, line ends, odd blanks, joined emoji, digits, apostrophes.
_ODD = (
    *("", " ", "e\u0301\u0323 \u1100\u1161 \ufb01\u2126", "a\r\n\t b\u00a0\u3000c\u0085\u2028", "\ufeff\u200b"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "1\uff11\u0663\u00bd 'LL '\u017f "),
)


class BulkEncoder:
    """Encodes the texts of one corpus as `Tokenizer.encode` does. Samples of them are encoded by `tokenizers` too.

    At the first difference `tokenizers` encodes this text and all that follow, and a warning says so.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fast: Any = None
        self._num_characters = 0  # encoded by `_fast`
        self._draw = random.Random(0)
        self._num_checked = FIRST_CHECKED
        if find_spec("gigatoken") is not None:
            self._renew()
            self._check([*_ODD, *(f"a{token} b {token}c" for token in tokenizer.added_texts)])

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text; uses all cores."""
        texts = list(texts)
        if self._fast is not None and texts:
            self._check(self._sample(texts))
        if self._fast is None:
            return [np.asarray(ids, dtype=np.uint32) for ids in self._tokenizer.encode_many(texts)]
        self._num_characters += sum(map(len, texts))
        if self._num_characters > RENEW_CHARACTERS:
            self._num_characters = 0
            self._renew()
        return self._encode_fast(texts)

    def _renew(self) -> None:
        self._fast = None  # frees the cache first
        try:
            from gigatoken import Tokenizer as FastTokenizer

            self._fast = FastTokenizer.from_json(self._tokenizer.plain_definition)
            self._encode_fast(["a"])  # without the package awkward there are lists only
        except Exception as error:  # the library raises several classes for what it does not support
            self._fall_back(f"gigatoken cannot read this tokenizer ({' '.join(str(error).split())[:100]})")

    def _encode_fast(self, texts: list[str]) -> list[Ids]:
        if not texts:
            return []
        layout = self._fast.encode_batch(texts).layout
        ids, ends = layout.content.data, layout.offsets.data
        return np.split(ids, ends[1:-1])

    def _sample(self, texts: list[str]) -> list[str]:
        chosen = self._draw.sample(texts, min(self._num_checked, len(texts)))
        self._num_checked = 1
        starts = (self._draw.randrange(max(1, len(text) - CHECKED_CHARACTERS + 1)) for text in chosen)
        return [text[start : start + CHECKED_CHARACTERS] for start, text in zip(starts, chosen, strict=True)]

    def _check(self, texts: list[str]) -> None:
        if self._fast is None:
            return
        for text, fast, ids in zip(texts, self._encode_fast(texts), self._tokenizer.encode_many(texts), strict=True):
            if fast.tolist() != ids:
                self._fall_back(f"gigatoken encodes {text[:40]!r} in another way than the library tokenizers")
                return

    def _fall_back(self, why: str) -> None:
        self._fast = None
        warnings.warn(f"{why}: texts are encoded by the slower library tokenizers", stacklevel=4)
