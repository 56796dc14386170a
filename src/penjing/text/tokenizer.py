"""Byte-level BPE: trained here, stored as a plain `tokenizer.json` that every engine reads.

The split is Qwen2's, which `transformers`, vLLM, llama.cpp and the fast bulk encoders all know; digits stand alone.
Text is encoded by a twin without the control tokens, so that no user text can ever become one.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_text, write_json, write_text
from penjing.text.template import CHAT_TEMPLATE

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_RESPONSE, END_TOOL_RESPONSE = "<tool_response>", "</tool_response>"
# In id order. The first three are never shown; the others are parts of an answer that readers parse.
HIDDEN_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
VISIBLE_TOKENS = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL, TOOL_RESPONSE, END_TOOL_RESPONSE)
CONTROL_TOKENS = HIDDEN_TOKENS + VISIBLE_TOKENS

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALLEST_VOCABULARY = 256 + len(CONTROL_TOKENS)
LONGEST_TOKEN_BYTES = 16
MOST_CHARACTERS = 40_000  # different ones in the text a tokenizer is trained on
SAMPLED_CHARACTERS = 8 << 20  # of it, counted to tell which merges come first


class Tokenizer:
    """Text to ids and back.

    `encode` never yields a control id, whatever the text says; control ids are put in by name through `control`.
    """

    def __init__(self, full: tokenizers.Tokenizer, template: str = CHAT_TEMPLATE) -> None:
        self._full = full
        self.template = template
        self._json = full.to_str()
        plain = json.loads(self._json)
        added = {token["content"] for token in plain["added_tokens"]}
        plain["added_tokens"] = []
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self._control = {token: index for token in CONTROL_TOKENS if (index := full.token_to_id(token)) is not None}
        missing = [token for token in HIDDEN_TOKENS if token not in self._control]
        if missing:
            raise UserError("the tokenizer has no " + " ".join(missing), wanted="a tokenizer in ChatML form")
        self.added_ids = frozenset(full.token_to_id(token) for token in added)

    @property
    def size(self) -> int:
        """Number of ids."""
        return int(self._full.get_vocab_size())

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer and its chat template: shards and checkpoints record it."""
        return sha256_text(self._json + self.template)

    def control(self, token: str) -> int:
        """The id of a control token; raises KeyError if the vocabulary has none."""
        return self._control[token]

    @property
    def end_of_text(self) -> int:
        return self._control[END_OF_TEXT]

    @property
    def message_end(self) -> int:
        return self._control[MESSAGE_END]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. `decode` gives the NFC form of the text back."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel where the machine allows."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, hide: bool = True) -> str:
        """Text of the ids; with `hide`, tokens that only mark the ends of texts and messages are left out."""
        return str(self._full.decode(list(ids), skip_special_tokens=hide))

    def token(self, index: int) -> str:
        """One id as readable text, broken bytes shown as replacement characters."""
        return self.decode([index], hide=False)

    def save(self, folder: Path) -> None:
        """Write the files `transformers` reads: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self._json)
        write_text(folder / "chat_template.jinja", self.template)
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END_OF_TEXT,
                "eos_token": MESSAGE_END,
                "pad_token": END_OF_TEXT,
                "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 1_000_000,
                "chat_template": self.template,
            },
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a tokenizer folder; a missing or broken file is a `UserError`."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UserError("no tokenizer here", where=folder, wanted="a folder with tokenizer.json")
        template_path = Path(folder) / "chat_template.jinja"
        template = template_path.read_text(encoding="utf-8") if template_path.is_file() else None
        if template is None and (Path(folder) / "tokenizer_config.json").is_file():
            template = read_json(Path(folder) / "tokenizer_config.json").get("chat_template")
        try:
            full = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            return cls(full, template or CHAT_TEMPLATE)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise UserError(f"not a readable tokenizer: {error}", where=path) from None


def train_tokenizer(texts: Iterable[str], vocabulary_size: int, *, han_run: int = 2) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocabulary_size` ids, where the text is rich enough to fill it.

    han_run: the longest run of Chinese characters one token may hold. Left alone, BPE makes whole phrases into
    tokens (3.1 characters a token on formulaic text, and prompts that start elsewhere break); 1 keeps characters
    apart, 2 allows words, 4 suits vocabularies of 6,400 and more. No token mixes Chinese with anything else.
    Raises UserError if `vocabulary_size` cannot hold the 256 bytes and the control tokens, or the text is empty.
    """
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise UserError(
            "too small", where="tokenizer.vocabulary", got=vocabulary_size, wanted=f"at least {SMALLEST_VOCABULARY}"
        )
    if han_run < 1:
        raise UserError("too small", where="tokenizer.han_run", got=han_run, wanted="at least 1")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError("there is no text to train a tokenizer on")
    wanted = vocabulary_size - SMALLEST_VOCABULARY
    return Tokenizer(_assemble(_merges(texts, wanted, han_run)[:wanted]))


def _split(first: str = "") -> pre_tokenizers.PreTokenizer:
    """Qwen2's split, after parting by the pattern `first`."""
    patterns = [first, QWEN2_SPLIT] if first else [QWEN2_SPLIT]
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def _byte_level(split: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(texts: list[str], wanted: int, han_run: int) -> list[tuple[str, str]]:
    """At least `wanted` merges, where the text has so many, in order, in the printable byte-level spelling.

    Learned at once, merges of bytes run across the borders of characters wherever text is formulaic: the last byte of
    看 and the first of 见 go together as often as the bytes of either. On our stories a quarter of all tokens were such
    fragments. So merges of whole characters (words) and merges of bytes inside single characters are learned apart and
    then put in one row by how often they occur.
    """
    words = _learn(texts, _split(r"\p{Han}" if han_run == 1 else r"\p{Han}+"), 2 * wanted + MOST_CHARACTERS)
    pieces = _learn(texts, _byte_level(_split(r"[^\x00-\x7f]")), 2 * wanted + 256)
    sample = list(_first(texts, SAMPLED_CHARACTERS))
    counts = Counter(chain.from_iterable(sample))
    for text in sample:
        counts.update(map(str.__add__, text, text[1:]))
    spelling = {value: mark for mark, value in _byte_values().items()}
    values = _byte_values()
    known = set(values)
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
            raw = bytes(values[mark] for mark in left + right)
            if counts.get(raw.decode("utf-8", "ignore"), at_least) < at_least:
                return
            waiting.popleft()
            if raw[0] >= 0x80:
                keep(left, right)

    level = counts.total()
    for left, right in words:
        if _acceptable(left + right, han_run):
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


def _byte_values() -> dict[str, int]:
    """The GPT-2 spelling of bytes: printable ones as themselves, the others from code point 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in set(printable))
    spelling.update({chr(256 + index): value for index, value in enumerate(others)})
    return spelling


def _is_han(character: str) -> bool:
    return "\u3400" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"


def _acceptable(text: str, han_run: int) -> bool:
    """Whether this may be one token: at most `han_run` Chinese characters and nothing beside them."""
    num_han = sum(map(_is_han, text))
    return num_han == 0 or (num_han == len(text) and num_han <= han_run)


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
