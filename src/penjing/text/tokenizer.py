"""Byte-level BPE: trained here, stored as a plain `tokenizer.json` that every engine reads.

The split is Qwen2's, which `transformers`, vLLM, llama.cpp and the fast bulk encoders all know; digits stand alone.
Text is encoded by a twin without the control tokens, so that no user text can ever become one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
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
    wanted = vocabulary_size - len(CONTROL_TOKENS)
    # Merges that break the Chinese rule are dropped afterwards, so more are learned than are kept.
    merges, alphabet = _learn_merges(texts, 2 * wanted, isolate_han=han_run == 1)
    kept = _allowed_merges(merges, han_run)[: wanted - len(alphabet)]
    return Tokenizer(_assemble(alphabet, kept))


def _split(isolate_han: bool) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Split(Regex(r"\p{Han}"), "isolated")] if isolate_han else []
    )
    steps.append(pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _learn_merges(texts: Iterable[str], size: int, *, isolate_han: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Plain BPE training; returns the merges in order and the byte alphabet, in the printable byte-level spelling."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = _split(isolate_han)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, max_token_length=LONGEST_TOKEN_BYTES, show_progress=False
    )
    learner.train_from_iterator(_not_empty(texts), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges], alphabet


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    seen = False
    for text in texts:
        seen = seen or bool(text.strip())
        yield text
    if not seen:
        raise UserError("there is no text to train a tokenizer on")


def _byte_values() -> dict[str, int]:
    """The GPT-2 spelling of bytes: printable ones as themselves, the others from code point 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in set(printable))
    spelling.update({chr(256 + index): value for index, value in enumerate(others)})
    return spelling


def _is_han(character: str) -> bool:
    return "\u3400" <= character <= "\u9fff" or "\uf900" <= character <= "\ufaff" or character >= "\U00020000"


def _acceptable(raw: bytes, han_run: int) -> bool:
    """Whether these bytes may be one token: at most `han_run` Chinese characters and nothing beside them."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        # A piece of one character: a lead byte with some of its continuation, never parts of two characters.
        return all(byte & 0xC0 == 0x80 for byte in raw[1:]) and len(raw) <= 3
    num_han = sum(map(_is_han, text))
    return num_han == 0 or (num_han == len(text) and num_han <= han_run)


def _allowed_merges(merges: list[tuple[str, str]], han_run: int) -> list[tuple[str, str]]:
    """The merges whose result is acceptable and whose parts were kept, in their order."""
    values = _byte_values()
    known = set(values)
    kept = []
    for left, right in merges:
        token = left + right
        if left in known and right in known and _acceptable(bytes(values[mark] for mark in token), han_run):
            known.add(token)
            kept.append((left, right))
    return kept


def _assemble(alphabet: list[str], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Control tokens first (ids 0..8), then bytes, then merges in order of learning."""
    vocabulary = {token: index for index, token in enumerate(CONTROL_TOKENS)}
    for token in alphabet:
        vocabulary[token] = len(vocabulary)
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    built = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = _split(isolate_han=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in HIDDEN_TOKENS])
    built.add_tokens([tokenizers.AddedToken(token, special=False) for token in VISIBLE_TOKENS])
    return built
