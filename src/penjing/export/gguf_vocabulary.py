"""A tokenizer as GGUF files hold it: tokens, their kinds, merges, and the name of the split that comes before them.

llama.cpp has no regular expression in the file; it knows a list of splits by name (`tokenizer.ggml.pre`). A tokenizer
whose split is not on it cannot be written. Nor is there a normaliser: llama.cpp encodes text as it comes, so text that
is not in NFC form gets other ids there than here.
"""

from __future__ import annotations

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

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of token, as llama.cpp numbers them

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Name in llama.cpp: the patterns, applied one after another, and whether a whole word that is a token is taken at once
# whatever the merges say.
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
    """What a GGUF file says about a tokenizer."""

    tokens: list[str]  # by id, in the printable byte-level spelling; control tokens as they read
    kinds: list[int]  # by id: NORMAL, CONTROL, USER_DEFINED or UNUSED
    merges: list[str]  # "left right", in order
    split: str  # tokenizer.ggml.pre
    begin: int  # opens a document, and what a template calls bos_token
    end_of_text: int  # closes one
    message_end: int  # closes a turn
    adds_begin: bool  # whether `begin` is put before every prompt
    template: str  # chat template; empty if there is none


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Read a tokenizer through the files it writes; ids up to `size` that it does not use become UNUSED tokens.

    Raises UserError for what llama.cpp cannot express: another model than byte-level BPE, an unknown split, a
    normaliser other than NFC.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        facts = read_json(Path(folder) / "tokenizer.json")
        stock = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    model = facts["model"]
    if model["type"] != "BPE" or not _is_byte_level(facts) or model.get("byte_fallback"):
        raise UserError("GGUF export knows byte-level BPE only", where="tokenizer", got=model["type"])
    normaliser = (facts.get("normalizer") or {"type": "NFC"})["type"]
    if normaliser != "NFC":
        raise UserError("llama.cpp has no such normaliser", where="tokenizer", got=normaliser, wanted="NFC or none")
    if tokenizer.size > size:
        raise UserError("has more ids than the model", where="tokenizer", got=tokenizer.size, wanted=f"at most {size}")
    tokens = [f"[UNUSED{index}]" for index in range(size)]
    kinds = [UNUSED] * size
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, NORMAL
    for added in facts["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        split=_split_name(facts["pre_tokenizer"], bool(model.get("ignore_merges"))),
        begin=token_ids(tokenizer)["bos_token_id"],
        end_of_text=tokenizer.end_of_text,
        message_end=tokenizer.message_end,
        adds_begin=stock.encode("a").ids[:1] == [tokenizer.begin],
        template=tokenizer.template,
    )


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """A tokenizer built from what the file says and nothing else; like llama.cpp it does not normalise."""
    patterns, whole_words = SPLITS[vocabulary.split]
    named = {token: index for index, token in enumerate(vocabulary.tokens) if vocabulary.kinds[index] != UNUSED}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    built = tokenizers.Tokenizer(models.BPE(vocab=named, merges=merges, ignore_merges=whole_words))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [token for token, index in named.items() if vocabulary.kinds[index] == kind]
        built.add_tokens([tokenizers.AddedToken(text, special=special) for text in texts])
    roles = SpecialTokens(
        begin=vocabulary.tokens[vocabulary.begin],
        end_of_text=vocabulary.tokens[vocabulary.end_of_text],
        message_end=vocabulary.tokens[vocabulary.message_end],
    )
    return Tokenizer(built, vocabulary.template, roles=roles)


def _steps(pre_tokenizer: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    """The parts of a pre-tokenizer, in order."""
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "Sequence":
        for part in pre_tokenizer["pretokenizers"]:
            yield from _steps(part)
    else:
        yield pre_tokenizer


def _is_byte_level(facts: dict[str, Any]) -> bool:
    steps = list(_steps(facts.get("pre_tokenizer")))
    return bool(steps) and steps[-1]["type"] == "ByteLevel" and not steps[-1].get("add_prefix_space", False)


def _split_name(pre_tokenizer: dict[str, Any], whole_words: bool) -> str:
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
    for name, (known, takes_whole_words) in SPLITS.items():
        if tuple(patterns) == known and whole_words == takes_whole_words:
            return name
    raise UserError(
        "llama.cpp knows no such split of text into words",
        where="tokenizer",
        got=" then ".join(patterns) or "none",
        wanted=f"that of {', '.join(SPLITS)}",
    )
