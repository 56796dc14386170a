"""Tokenizer: our byte-level BPE, and external tokenizers, stored as a `tokenizer.json` that every engine reads.

The pre-tokenizer is Qwen2's, which `transformers`, vLLM, llama.cpp and fast bulk encoders support; each digit is one
token. Text is encoded by a copy of the tokenizer without control tokens, so that user text can never become one. For
external tokenizers the tokens that start and end texts and turns are inferred from the files beside `tokenizer.json`.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from penjing.base.errors import UserError
from penjing.base.files import sha256_text, write_json, write_text
from penjing.data.chat import CHAT_TEMPLATE, EARLIER_TEMPLATES
from penjing.data.chat.external_templates import answer_end
from penjing.data.tokenizer.config_files import (
    add_config_tokens,
    read_object,
    read_template,
    token_text,
    without_token_list,
)
from penjing.data.tokenizer.regex_dos_check import read_checked

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
TOOL_RESPONSE, END_TOOL_RESPONSE = "<tool_response>", "</tool_response>"
# In id order. The first three are never shown; the others are parts of an answer.
HIDDEN_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
VISIBLE_TOKENS = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL, TOOL_RESPONSE, END_TOOL_RESPONSE)
CONTROL_TOKENS = HIDDEN_TOKENS + VISIBLE_TOKENS

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ROLES = "penjing_roles.json"  # saved with an external tokenizer: its inferred special tokens
SMALLEST_VOCABULARY = 256 + len(CONTROL_TOKENS)


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    end_of_text: str  # ends a document
    message_end: str  # ends a turn of a conversation
    begin: str  # starts a document
    names: tuple[tuple[str, str], ...] = ()  # names in chat templates: ("bos_token", "<s>"), ...
    stop: tuple[str, ...] = ()  # further tokens that end an answer


_CHATML_TOKENS = SpecialTokens(
    end_of_text=END_OF_TEXT,
    message_end=MESSAGE_END,
    begin=END_OF_TEXT,
    names=(("bos_token", END_OF_TEXT), ("eos_token", MESSAGE_END), ("pad_token", END_OF_TEXT)),
)


class Tokenizer:
    """Text to ids and back.

    `encode` never returns a control id, whatever the text; `control` returns control ids by name.
    template: the chat template; empty if there is none. roles: None for our own tokenizers. settings: the
    tokenizer_config.json that `save` writes; None for our own.
    """

    def __init__(
        self,
        full: tokenizers.Tokenizer,
        template: str = CHAT_TEMPLATE,
        *,
        roles: SpecialTokens | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        full.no_truncation()  # saved truncation or padding would change every text
        full.no_padding()
        self._full = full
        self.template = template
        self.definition = full.to_str()  # the text of its tokenizer.json
        self._settings = settings
        added = [token for token in json.loads(self.definition)["added_tokens"] if is_control(token)]
        self._flags = {token["content"]: token for token in added}
        self._control = {token["content"]: int(token["id"]) for token in added}
        self.roles = roles or _CHATML_TOKENS
        needed = HIDDEN_TOKENS if roles is None else (roles.end_of_text, roles.message_end, roles.begin)
        missing = [token for token in needed if token not in self._control]
        if missing:
            raise UserError("the tokenizer has no " + " ".join(missing), wanted="a tokenizer in ChatML form")
        self._plain, self._guard = _strip_control_tokens(json.loads(self.definition), set(self._control))
        self.added_ids = frozenset(self._control.values())
        lost = next((token for token in self._control if not _MARK.fullmatch(token) and not self._writes(token)), None)
        if lost is not None:
            raise _lost_text_error(lost)
        self.end_of_text = self._control[self.roles.end_of_text]
        self.message_end = self._control[self.roles.message_end]
        # Precedes a document: the end-of-text token, or a separate token (`<s>`).
        self.begin = self._control[self.roles.begin]
        # Ids that end an answer.
        self.stop = frozenset((self.end_of_text, self.message_end, *map(self.control, self.roles.stop)))
        if not {self.begin, *self.stop}.isdisjoint(self.encode(_RARE)):
            what = "the token for unknown characters also begins or ends texts"
            hint = "Name other tokens as eos_token and bos_token in tokenizer_config.json."
            raise UserError(what, where="tokenizer.json", wanted="a token of its own for each", next_step=hint)
        longest_first = sorted(self._control, key=len, reverse=True)
        self.control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _writes(self, token: str) -> bool:
        """Whether the text of a control token can be encoded as text, at the start of a word and inside it.

        Not if it is a byte token, which encodes characters without a token of their own.
        """
        encoded = [self.encode(token), self.encode(token * 2)]
        is_text = all(self.decode(ids) and self.added_ids.isdisjoint(ids) for ids in encoded)
        return is_text and not _BYTE_TOKEN.fullmatch(token)

    @cached_property
    def size(self) -> int:
        """Number of ids: one more than the largest."""
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer and its chat template: shards and checkpoints record it."""
        roles = "" if self.roles == _CHATML_TOKENS else json.dumps(asdict(self.roles))
        return sha256_text(self.definition + self.template + roles)

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 over the vocabulary and the encoding, without template and roles."""
        return sha256_text(self.definition)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, as the vocabulary spells it, control tokens and other added ones included."""
        return dict(self._full.get_vocab(with_added_tokens=True))

    @property
    def plain_definition(self) -> str:
        """The tokenizer.json of the encoder of texts, which has no control tokens."""
        return str(self._plain.to_str())

    @property
    def added_texts(self) -> list[str]:
        """The added tokens that may occur in texts: all but the control tokens."""
        added = self._full.get_added_tokens_decoder()
        return [added[index].content for index in sorted(added) if added[index].content not in self._control]

    def has(self, token: str) -> bool:
        return token in self._control

    def control(self, token: str) -> int:
        """The id of a control token; raises KeyError if the vocabulary has none."""
        return self._control[token]

    @property
    def is_ours(self) -> bool:
        """Whether `data/chat/render.py` renders conversations itself, without an external template."""
        return self.template == CHAT_TEMPLATE and not self.missing_chatml

    @property
    def missing_chatml(self) -> list[str]:
        """The control tokens that our chat template needs and this vocabulary lacks."""
        return [token for token in (MESSAGE_START, MESSAGE_END) if token not in self._control]

    def trims(self, token: str) -> tuple[bool, bool]:
        """Whether a control token strips the white space before it, and after it."""
        return bool(self._flags[token]["lstrip"]), bool(self._flags[token]["rstrip"])

    def encode(self, text: str, *, after_control: bool = False) -> list[int]:
        """Ids of plain text. `decode` gives the NFC form of the text back.

        after_control: the text follows a control token; this matters if the vocabulary marks the start of a text.
        """
        return self.encode_with_ends(text, after_control=after_control)[0]

    def encode_with_ends(self, text: str, *, after_control: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of plain text, and the (start, end) characters in `text` of each."""
        if not (after_control and self._guard):
            encoding = self._plain.encode(text, add_special_tokens=False)
            return list(encoding.ids), list(encoding.offsets)
        encoding = self._plain.encode(self._guard + text.replace(self._guard, ""), add_special_tokens=False)
        shift = len(self._guard)
        return list(encoding.ids[1:]), [(start - shift, stop - shift) for start, stop in encoding.offsets[1:]]

    def tokens_with_words(self, text: str) -> list[tuple[str, int | None]]:
        """The tokens of plain text as the vocabulary spells them, each with the number of its word."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        return list(zip(encoding.tokens, encoding.word_ids, strict=True))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in parallel where the machine allows."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, hide: bool = True) -> str:
        """Text of the ids; `hide` leaves out the tokens that only mark starts and ends of texts and messages."""
        return str(self._full.decode(list(ids), skip_special_tokens=hide))

    def token(self, index: int) -> str:
        """One id as text; incomplete UTF-8 becomes replacement characters."""
        return self.decode([index], hide=False)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one id, which may end inside a character; empty for an unknown id."""
        return self._token_bytes[index] if 0 <= index < len(self._token_bytes) else b""

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        is_byte_level = '"ByteLevel"' in json.dumps(json.loads(self.definition).get("decoder"))
        added = self._full.get_added_tokens_decoder()
        bytes_by_id = [b""] * self.size
        for text, index in self._full.get_vocab(with_added_tokens=True).items():
            if index in added:
                bytes_by_id[index] = text.encode()
            elif is_byte_level and all(character in BYTE_OF for character in text):
                bytes_by_id[index] = bytes(BYTE_OF[character] for character in text)
            elif _BYTE_TOKEN.fullmatch(text):
                bytes_by_id[index] = bytes([int(text[3:5], 16)])
            else:
                bytes_by_id[index] = text.replace("\u2581", " ").encode()
        return bytes_by_id

    def with_chatml(self, *, visible: bool = True) -> "Tokenizer":
        """A copy with our chat template and the control tokens that it needs, for base models without a template.

        New tokens get the ids after the last one: the model needs rows for them (model/resize_embeddings.py). visible:
        also add the tokens for thoughts and tool calls, which are plain text otherwise.
        """
        full = tokenizers.Tokenizer.from_str(self.definition)
        for names, special in ((self.missing_chatml, True), (VISIBLE_TOKENS if visible else (), False)):
            missing = [name for name in names if name not in self._control]
            # A vocabulary entry with the same text becomes the token; otherwise it gets a new id.
            full.add_tokens([tokenizers.AddedToken(name, special=special, normalized=False) for name in missing])
        token_names = dict(self.roles.names) | {"eos_token": MESSAGE_END}
        roles = replace(self.roles, message_end=MESSAGE_END, names=tuple(sorted(token_names.items())))
        settings = {**(self._settings or {}), "eos_token": MESSAGE_END}
        return Tokenizer(full, CHAT_TEMPLATE, roles=roles, settings=without_token_list(settings))

    def with_definition(self, definition: str) -> "Tokenizer":
        """A copy with another tokenizer.json, and the same template and special tokens."""
        roles = None if self.roles == _CHATML_TOKENS else self.roles
        settings = self._settings and without_token_list(self._settings)
        return Tokenizer(tokenizers.Tokenizer.from_str(definition), self.template, roles=roles, settings=settings)

    def save(self, folder: Path) -> None:
        """Write the files `transformers` reads: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "tokenizer.json", self.definition)
        if self.template:
            write_text(folder / "chat_template.jinja", self.template)
        settings = self._settings
        if settings is None:
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": END_OF_TEXT,
                "eos_token": MESSAGE_END,
                "pad_token": END_OF_TEXT,
                "add_bos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": 1_000_000,
            }
        else:  # names from another file; chat templates refer to them
            settings = {**settings, **{n: token for n, token in self.roles.names if not token_text(settings.get(n))}}
        template = {"chat_template": self.template} if self.template else {}
        write_json(folder / "tokenizer_config.json", {**settings, **template})
        if self.roles != _CHATML_TOKENS:
            write_json(folder / ROLES, asdict(self.roles))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a tokenizer folder, ours or that of any Hugging Face model.

        Raises UserError if a file is missing or broken, or if no token that ends a text can be inferred.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            advice = "load the tokenizer with transformers, and call save_pretrained on it."
            hint = f"tokenizer.model alone is not read: {advice}" if (folder / "tokenizer.model").is_file() else None
            raise UserError("no tokenizer here", where=folder, wanted="a folder with tokenizer.json", next_step=hint)
        template, settings = read_template(folder), read_object(folder / "tokenizer_config.json")
        settings.pop("chat_template", None)
        template = CHAT_TEMPLATE if sha256_text(template) in EARLIER_TEMPLATES else template
        try:
            full = tokenizers.Tokenizer.from_str(read_checked(path))
            ours = all(full.token_to_id(token) is not None for token in CONTROL_TOKENS)
            if ours and (template or CHAT_TEMPLATE) == CHAT_TEMPLATE and not (folder / ROLES).is_file():
                return cls(full, CHAT_TEMPLATE)
            add_config_tokens(full, settings, folder)
            if saved := read_object(folder / ROLES):
                names, stop = tuple(map(tuple, saved["names"])), tuple(saved["stop"])
                roles = SpecialTokens(**{**saved, "names": names, "stop": stop})
            else:
                roles = infer_special_tokens(full, folder, template, settings)
            return cls(full, template, roles=roles, settings=settings)
        except UserError:
            raise
        except Exception as error:  # the library raises plain Exception for any damage
            raise UserError(f"not a readable tokenizer: {error}", where=path) from None


# --- external tokenizers ---------------------------------------------------------------------------------------------

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_STRUCTURAL_NAMES = ("bos_token", "eos_token")
# Tokens that end a document when `eos_token` in tokenizer_config.json is the end of a turn.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_RARE = "\u16a0\U0001d11e\U0001fa81"  # characters that few vocabularies have
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # byte tokens of vocabularies that are not byte-level
# Characters for bytes in byte-level vocabularies: printable bytes unchanged, the others from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
_MARK = re.compile(r"(?!<0x[0-9A-F]{2}>$).?[<\[|\uff5c].+[>\]|\uff5c]", re.DOTALL)


def is_control(token: Mapping[str, Any]) -> bool:
    """Whether an added token is structural. The others (runs of blanks, words) may occur in user text."""
    return bool(token["special"]) or _MARK.fullmatch(token["content"]) is not None


def _strip_control_tokens(definition: dict[str, Any], control: set[str]) -> tuple[tokenizers.Tokenizer, str]:
    """A copy of the tokenizer that cannot produce a control id, and its guard token, which means "not at the start".

    Vocabularies that mark the start of a text (Metaspace) encode a word differently there than after a control token;
    only their copies have a guard. In the copy the control tokens have random texts, so that no input matches them.
    They cannot be removed: the library would then renumber the tokens added after them, and unigram models would still
    match their texts. Raises UserError if ids change all the same.
    """
    model, nonce = definition["model"], secrets.token_hex(16)
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocabulary, list) and model.get("unk_id") is not None:
        unknown = vocabulary[model["unk_id"]][0]
    replacements = {
        content: f"\U0010fffd{nonce}{number}\U0010fffd"
        for number, content in enumerate(sorted(control))
        if content != unknown
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    definition["added_tokens"] = [
        {**token, "content": replacements[token["content"]], **flags} if token["content"] in control else token
        for token in definition["added_tokens"]
        if token["content"] not in control or token["content"] != unknown
    ]
    if isinstance(vocabulary, list):
        model["vocab"] = [[replacements.get(piece, piece), score] for piece, score in vocabulary]
    else:
        model["vocab"] = {replacements.get(piece, piece): index for piece, index in vocabulary.items()}
    try:
        twin = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library's only class; merges may need a token
        lost = [token for token in control if not _MARK.fullmatch(token) and f"`{token}`" in str(error)]
        raise (_lost_text_error(lost[0]) if lost else error) from None
    for token in definition["added_tokens"]:
        if twin.token_to_id(token["content"]) != token["id"]:
            raise UserError("added tokens whose ids have a gap", where="tokenizer.json", got=token["content"][:40])
    if "Metaspace" not in json.dumps([definition.get("pre_tokenizer"), definition.get("normalizer")]):
        return twin, ""
    guard = "\U0010fffe\U0010fffc\U0010fffe"
    twin.add_special_tokens([tokenizers.AddedToken(guard, special=True, normalized=False)])
    return twin, guard


def _lost_text_error(token: str) -> UserError:
    what = "a control token is an ordinary word, which would vanish from every text"
    return UserError(what, where="tokenizer.json", got=repr(token), next_step="Remove it from added_tokens.")


def infer_special_tokens(
    full: tokenizers.Tokenizer, folder: Path, template: str, settings: Mapping[str, Any]
) -> SpecialTokens:
    """Infer the tokens that start and end texts and turns from the folder's files and the output of its template.

    Raises UserError if no token ends a text.
    """
    token_map = read_object(folder / "special_tokens_map.json")
    names = {
        name: token for name in NAMES if (token := token_text(settings.get(name)) or token_text(token_map.get(name)))
    }
    ends = _generation_end_tokens(full, folder)
    if "eos_token" not in names and ends:
        names["eos_token"] = ends[0]
    missing = [token for token in names.values() if full.token_to_id(token) is None]
    if missing:
        what = "the tokenizer has no " + " ".join(missing)
        raise UserError(what, where=folder, wanted="what tokenizer_config.json names")
    # Some files name an ordinary vocabulary entry. It becomes a control token if it is a mark. Others, such as a
    # padding word, may occur in user text, and would vanish from it.
    added = {token.content for token in full.get_added_tokens_decoder().values()}
    for name, token in names.items():
        if name in _STRUCTURAL_NAMES and token not in added and not _MARK.fullmatch(token):
            what = f"{name} is an ordinary token, which would vanish from every text"
            wanted = "an added token, or a mark such as </s>"
            hint = f"Correct {name} in tokenizer_config.json."
            raise UserError(what, where=folder, got=repr(token), wanted=wanted, next_step=hint)
    structural = [token for name, token in names.items() if name in _STRUCTURAL_NAMES or _MARK.fullmatch(token)]
    full.add_special_tokens(list(dict.fromkeys([*structural, *ends])))
    special = [token.content for token in full.get_added_tokens_decoder().values() if token.special]
    text_end = next((token for token in _END_OF_TEXT_NAMES if token in special), None)
    eos = names.get("eos_token") or text_end
    if eos is None:
        raise UserError("its end-of-text token cannot be found", where=folder, wanted="eos_token")
    message_end = answer_end(template, names, [eos, *ends], special) if template else None
    message_end = message_end or eos
    end_of_text = (text_end or eos) if eos == message_end else eos
    bos = names.get("bos_token")
    begin = bos if bos is not None and _adds_bos(full, bos, settings) else end_of_text
    return SpecialTokens(
        end_of_text=end_of_text,
        message_end=message_end,
        begin=begin,
        names=tuple(sorted(names.items())),
        stop=tuple(token for token in ends if token not in (end_of_text, message_end)),
    )


def _generation_end_tokens(full: tokenizers.Tokenizer, folder: Path) -> list[str]:
    """The tokens that end generation, from generation_config.json or config.json.

    Only added tokens: configs of other models keep a library's default id, which may be any word here.
    """
    added = full.get_added_tokens_decoder()
    for name in ("generation_config.json", "config.json"):
        value = read_object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if tokens := [added[index].content for index in ids if type(index) is int and index in added]:
            return tokens
    return []


def _adds_bos(full: tokenizers.Tokenizer, bos: str, settings: Mapping[str, Any]) -> bool:
    """Whether the model expects a BOS token before every document."""
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    ids = full.encode("a", add_special_tokens=True).ids
    return bool(ids) and ids[0] == full.token_to_id(bos)
