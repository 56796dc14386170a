"""A tokenizer in GGUF form: tokens, their types, merges, and the name of the pre-tokenizer.

A GGUF file holds no regular expression: `tokenizer.ggml.pre` names one of the pre-tokenizers built into llama.cpp. A
tokenizer with another one cannot be written. llama.cpp has no normaliser either, so text that is not in NFC form gets
different ids there.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.data.tokenizer.tokenizer import QWEN2_SPLIT, SpecialTokens, Tokenizer
from penjing.export.hf import token_ids

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's token types

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# By name in llama.cpp: the patterns, applied one after another, and ignore_merges: whether a word that is a token is
# encoded as that token, whatever the merges.
SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    "qwen2": ((QWEN2_SPLIT,), False),
    "qwen35": ((QWEN35_SPLIT,), False),
    "llama-bpe": ((LLAMA3_SPLIT,), True),
    "smaug-bpe": ((LLAMA3_SPLIT,), False),
    "gpt-2": ((GPT2_SPLIT,), False),
    "smollm": ((r"\p{N}", GPT2_SPLIT), False),
}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    tokens: list[str]  # by id, in the printable byte-level spelling; control tokens as text
    token_types: list[int]  # by id: NORMAL, CONTROL, USER_DEFINED or UNUSED
    merges: list[str]  # "left right", in order
    pre_tokenizer: str  # tokenizer.ggml.pre
    bos: int  # starts a document; bos_token in templates
    end_of_text: int  # ends a document
    message_end: int  # ends a turn
    add_bos: bool  # whether `bos` is put before every prompt
    chat_template: str  # empty if there is none


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Read a tokenizer from the files it saves; unused ids up to `size` become UNUSED tokens.

    Raises UserError for what llama.cpp cannot express: a model other than byte-level BPE, an unknown pre-tokenizer, a
    normaliser other than NFC.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        tokenizer_json = read_json(Path(folder) / "tokenizer.json")
        reloaded = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    model = tokenizer_json["model"]
    if model["type"] != "BPE" or not _is_byte_level(tokenizer_json) or model.get("byte_fallback"):
        raise UserError("GGUF export supports byte-level BPE only", where="tokenizer", got=model["type"])
    normaliser = (tokenizer_json.get("normalizer") or {"type": "NFC"})["type"]
    if normaliser != "NFC":
        raise UserError(
            "llama.cpp does not support this normaliser", where="tokenizer", got=normaliser, wanted="NFC or none"
        )
    if tokenizer.size > size:
        raise UserError("has more ids than the model", where="tokenizer", got=tokenizer.size, wanted=f"at most {size}")
    tokens = [f"[UNUSED{index}]" for index in range(size)]
    token_types = [UNUSED] * size
    for token, index in model["vocab"].items():
        tokens[index], token_types[index] = token, NORMAL
    for added in tokenizer_json["added_tokens"]:
        tokens[added["id"]] = added["content"]
        token_types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return Vocabulary(
        tokens=tokens,
        token_types=token_types,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        pre_tokenizer=_split_name(tokenizer_json["pre_tokenizer"], bool(model.get("ignore_merges"))),
        bos=token_ids(tokenizer)["bos_token_id"],
        end_of_text=tokenizer.end_of_text,
        message_end=tokenizer.message_end,
        add_bos=reloaded.encode("a").ids[:1] == [tokenizer.begin],
        chat_template=tokenizer.template,
    )


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer built from the file alone; like llama.cpp it does not normalise."""
    patterns, ignore_merges = SPLITS[vocabulary.pre_tokenizer]
    ids = {token: index for index, token in enumerate(vocabulary.tokens) if vocabulary.token_types[index] != UNUSED}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    built = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    for token_type, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [token for token, index in ids.items() if vocabulary.token_types[index] == token_type]
        built.add_tokens([tokenizers.AddedToken(text, special=special) for text in texts])
    roles = SpecialTokens(
        begin=vocabulary.tokens[vocabulary.bos],
        end_of_text=vocabulary.tokens[vocabulary.end_of_text],
        message_end=vocabulary.tokens[vocabulary.message_end],
    )
    return Tokenizer(built, vocabulary.chat_template, roles=roles)


def _steps(pre_tokenizer: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "Sequence":
        for part in pre_tokenizer["pretokenizers"]:
            yield from _steps(part)
    else:
        yield pre_tokenizer


def _is_byte_level(tokenizer_json: dict[str, Any]) -> bool:
    steps = list(_steps(tokenizer_json.get("pre_tokenizer")))
    return bool(steps) and steps[-1]["type"] == "ByteLevel" and not steps[-1].get("add_prefix_space", False)


def _split_name(pre_tokenizer: dict[str, Any], ignore_merges: bool) -> str:
    patterns = []
    for step in _steps(pre_tokenizer):
        if step["type"] == "ByteLevel":
            patterns += [GPT2_SPLIT] if step.get("use_regex", True) else []
        elif step["type"] == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            pattern = step["pattern"]
            patterns.append(pattern.get("Regex") or f"the text {pattern.get('String')!r}")
        else:
            patterns.append(f"a {step['type']} step")
    for name, (split_patterns, split_ignores_merges) in SPLITS.items():
        if tuple(patterns) == split_patterns and ignore_merges == split_ignores_merges:
            return name
    what = "llama.cpp does not support this pre-tokenizer"
    wanted = f"that of {', '.join(SPLITS)}"
    raise UserError(what, where="tokenizer", got=" then ".join(patterns) or "none", wanted=wanted)
