"""Train a byte-level BPE tokenizer (arXiv:1508.07909) with a limit on Chinese characters per token."""

import json
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from penjing.base.errors import UserError
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.training_sample import sample_texts, spread

MAX_TOKEN_BYTES = 16
# Training takes time quadratic in the length of a piece. Text without spaces (DNA, base64) is one piece.
MAX_PIECE_CHARACTERS = 1024
MAX_CHARACTERS = 40_000  # distinct ones in the training text of a tokenizer
SAMPLED_CHARACTERS = 8 << 20  # of the training text, counted to order the merges


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    max_han_per_token: int = 2,
    note: Callable[[str], None] = lambda text: None,
    sampled: Callable[[], None] = lambda: None,
    show_progress: bool = False,
) -> tokens.Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` ids, if the text has enough merges.

    max_han_per_token: the maximum of Chinese characters per token. Without a limit BPE merges whole phrases (3.1
    characters per token on formulaic text), and prompts that start elsewhere break. 1 keeps characters apart, 2 allows
    words, 4 suits vocabularies of 6,400 and more. No token mixes Chinese with anything else.
    note: gets what is left out of a large corpus. sampled: called when all texts are read. show_progress: draw bars on
    a terminal from then on.
    Raises UserError if `vocab_size` cannot hold the 256 bytes and the control tokens, or the text is empty.
    """
    if vocab_size < tokens.SMALLEST_VOCABULARY:
        wanted = f"at least {tokens.SMALLEST_VOCABULARY}"
        raise UserError("too small", where="tokenizer.vocab_size", got=vocab_size, wanted=wanted)
    if max_han_per_token < 1:
        raise UserError("too small", where="tokenizer.max_han_per_token", got=max_han_per_token, wanted="at least 1")
    sample = sample_texts(texts)
    sampled()
    if sample.note:
        note(sample.note)
    if not sample.texts:
        raise UserError("there is no text to train a tokenizer on")
    num_merges = vocab_size - tokens.SMALLEST_VOCABULARY
    merges = _merges(sample.texts, num_merges, max_han_per_token, show_progress)
    return tokens.Tokenizer(_assemble(merges[:num_merges]))


def byte_tokenizer() -> tokens.Tokenizer:
    """A tokenizer without merges: it shows how a conversation is written before there is a trained one."""
    return tokens.Tokenizer(_assemble([]))


def _split(first: str = "") -> pre_tokenizers.PreTokenizer:
    """Qwen2's pre-tokenizer, after a split by the pattern `first`."""
    patterns = [first, tokens.QWEN2_SPLIT] if first else [tokens.QWEN2_SPLIT]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def _byte_level(split: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(
    texts: list[str], num_merges: int, max_han_per_token: int, show_progress: bool = False
) -> list[tuple[str, str]]:
    """At least `num_merges` merges, if the text has so many, in order, in the printable byte-level spelling.

    Plain byte-level BPE merges bytes across character boundaries in formulaic text: the last byte of 看 and the first
    of 见 occur together as often as the bytes of either. On our stories a quarter of all tokens were such fragments.
    Therefore merges of characters (words) and merges of bytes within a character are trained separately, and then
    ordered by frequency.
    """
    words = _split(r"\p{Han}" if max_han_per_token == 1 else r"\p{Han}+")
    word_merges = _train_bpe(texts, words, 2 * num_merges + MAX_CHARACTERS, show_progress)
    byte_merges = _train_bpe(texts, _byte_level(_split(r"[^\x00-\x7f]")), 2 * num_merges + 256, show_progress)
    sampled = spread(texts, SAMPLED_CHARACTERS / sum(map(len, texts)))
    sample = [unicodedata.normalize("NFC", text) for text in sampled]
    counts = Counter(chain.from_iterable(sample))
    for text in sample:
        counts.update(map(str.__add__, text, text[1:]))
    byte_characters = {value: character for character, value in tokens.BYTE_OF.items()}
    known = set(tokens.BYTE_OF)
    merges: list[tuple[str, str]] = []

    def add_merge(left: str, right: str) -> None:
        if left in known and right in known and left + right not in known and len(left + right) <= MAX_TOKEN_BYTES:
            known.add(left + right)
            merges.append((left, right))

    pending = deque(byte_merges)

    def add_byte_merges(min_count: int) -> None:
        """Add the byte merges of characters that occur at least this often."""
        while pending:
            left, right = pending[0]
            raw = bytes(tokens.BYTE_OF[character] for character in left + right)
            if counts.get(raw.decode("utf-8", "ignore"), min_count) < min_count:
                return
            pending.popleft()
            if raw[0] >= 0x80:
                add_merge(left, right)

    frequency = counts.total()
    for left, right in word_merges:
        if is_allowed_token(left + right, max_han_per_token):
            frequency = min(frequency, counts.get(left + right, frequency))
            add_byte_merges(frequency)
            add_merge(*("".join(byte_characters[byte] for byte in side.encode()) for side in (left, right)))
    add_byte_merges(0)
    return merges


def _train_bpe(
    texts: list[str], split: pre_tokenizers.PreTokenizer, size: int, show_progress: bool
) -> list[tuple[str, str]]:
    """Plain BPE; returns the merges in order."""
    size = min(size, 24 * sum(map(len, texts)))  # the library allocates memory for all of it, and there cannot be more
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.FixedLength(MAX_PIECE_CHARACTERS)])
    trainer = trainers.BpeTrainer(vocab_size=size, max_token_length=MAX_TOKEN_BYTES, show_progress=show_progress)
    bpe.train_from_iterator(texts, trainer)
    return [(left, right) for left, right in json.loads(bpe.to_str())["model"]["merges"]]


def _is_han(character: str) -> bool:
    return "\u3400" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"


def is_allowed_token(text: str, max_han_per_token: int) -> bool:
    """Whether this may be a token: at most `max_han_per_token` Chinese characters, not mixed with others."""
    num_han = sum(map(_is_han, text))
    return num_han == 0 or (num_han == len(text) and num_han <= max_han_per_token)


def _assemble(merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """The tokenizer: control tokens (ids 0..8), then bytes, then merges in order."""
    vocabulary = {token: index for index, token in enumerate(tokens.CONTROL_TOKENS)}
    for token in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[token] = len(vocabulary)
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    built = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = _byte_level(_split())
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in tokens.HIDDEN_TOKENS])
    built.add_tokens([tokenizers.AddedToken(token, special=False) for token in tokens.VISIBLE_TOKENS])
    return built
