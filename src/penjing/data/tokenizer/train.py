"""Train a byte-level BPE tokenizer (arXiv:1508.07909) with a limit on Chinese characters per token."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from penjing.base.errors import UserError
from penjing.data.tokenizer.tokenizer import (
    BYTE_OF,
    CONTROL_TOKENS,
    HIDDEN_TOKENS,
    QWEN2_SPLIT,
    SMALLEST_VOCABULARY,
    VISIBLE_TOKENS,
    Tokenizer,
)

LONGEST_TOKEN_BYTES = 16
MOST_CHARACTERS = 40_000  # different ones in the text a tokenizer is trained on
SAMPLED_CHARACTERS = 8 << 20  # of it, counted to tell which merges come first


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, max_han_per_token: int = 2) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` ids, where the text is rich enough to fill it.

    max_han_per_token: the longest run of Chinese characters one token may hold. Left alone, BPE makes whole phrases
    into tokens (3.1 characters a token on formulaic text, and prompts that start elsewhere break); 1 keeps characters
    apart, 2 allows words, 4 suits vocabularies of 6,400 and more. No token mixes Chinese with anything else.
    Raises UserError if `vocab_size` cannot hold the 256 bytes and the control tokens, or the text is empty.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            "too small", where="tokenizer.vocab_size", got=vocab_size, wanted=f"at least {SMALLEST_VOCABULARY}"
        )
    if max_han_per_token < 1:
        raise UserError("too small", where="tokenizer.max_han_per_token", got=max_han_per_token, wanted="at least 1")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError("there is no text to train a tokenizer on")
    wanted = vocab_size - SMALLEST_VOCABULARY
    return Tokenizer(_assemble(_merges(texts, wanted, max_han_per_token)[:wanted]))


def _split(first: str = "") -> pre_tokenizers.PreTokenizer:
    """Qwen2's split, after parting by the pattern `first`."""
    patterns = [first, QWEN2_SPLIT] if first else [QWEN2_SPLIT]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def _byte_level(split: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(texts: list[str], wanted: int, max_han_per_token: int) -> list[tuple[str, str]]:
    """At least `wanted` merges, where the text has so many, in order, in the printable byte-level spelling.

    Learned at once, merges of bytes run across the borders of characters wherever text is formulaic: the last byte of
    看 and the first of 见 go together as often as the bytes of either. On our stories a quarter of all tokens were such
    fragments. So merges of whole characters (words) and merges of bytes inside single characters are learned apart and
    then put in one row by how often they occur.
    """
    words = _learn(texts, _split(r"\p{Han}" if max_han_per_token == 1 else r"\p{Han}+"), 2 * wanted + MOST_CHARACTERS)
    pieces = _learn(texts, _byte_level(_split(r"[^\x00-\x7f]")), 2 * wanted + 256)
    sample = list(_first(texts, SAMPLED_CHARACTERS))
    counts = Counter(chain.from_iterable(sample))
    for text in sample:
        counts.update(map(str.__add__, text, text[1:]))
    spelling = {value: mark for mark, value in BYTE_OF.items()}
    known = set(BYTE_OF)
    merges: list[tuple[str, str]] = []

    def keep(left: str, right: str) -> None:
        if left in known and right in known and left + right not in known and len(left + right) <= LONGEST_TOKEN_BYTES:
            known.add(left + right)
            merges.append((left, right))

    waiting = deque(pieces)

    def keep_pieces(at_least: int) -> None:
        """The pieces of characters that occur so often."""
        while waiting:
            left, right = waiting[0]
            raw = bytes(BYTE_OF[mark] for mark in left + right)
            if counts.get(raw.decode("utf-8", "ignore"), at_least) < at_least:
                return
            waiting.popleft()
            if raw[0] >= 0x80:
                keep(left, right)

    level = counts.total()
    for left, right in words:
        if _acceptable(left + right, max_han_per_token):
            level = min(level, counts.get(left + right, level))
            keep_pieces(level)
            keep(*("".join(spelling[byte] for byte in part.encode()) for part in (left, right)))
    keep_pieces(0)
    return merges


def _learn(texts: list[str], split: pre_tokenizers.PreTokenizer, size: int) -> list[tuple[str, str]]:
    """Plain BPE; returns the merges in order."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = split
    trainer = trainers.BpeTrainer(vocab_size=size, max_token_length=LONGEST_TOKEN_BYTES, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]


def _first(texts: list[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        if num_characters <= 0:
            return
        yield unicodedata.normalize("NFC", text)
        num_characters -= len(text)


def _is_han(character: str) -> bool:
    return "\u3400" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"


def _acceptable(text: str, max_han_per_token: int) -> bool:
    """Whether this may be one token: at most `max_han_per_token` Chinese characters and nothing beside them."""
    num_han = sum(map(_is_han, text))
    return num_han == 0 or (num_han == len(text) and num_han <= max_han_per_token)


def _assemble(merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Control tokens first (ids 0..8), then bytes, then merges in order of learning."""
    vocabulary = {token: index for index, token in enumerate(CONTROL_TOKENS)}
    for token in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[token] = len(vocabulary)
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    built = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = _byte_level(_split())
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in HIDDEN_TOKENS])
    built.add_tokens([tokenizers.AddedToken(token, special=False) for token in VISIBLE_TOKENS])
    return built
