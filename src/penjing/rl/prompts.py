"""Reads prompts with their reference answers, and splits them into training and held-out prompts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.chat.render import render
from penjing.data.corpus import Corpus, threshold
from penjing.data.formats import BadRecords, Chat, NoBadRecords
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.rl.rewards.base import RewardContext

TRUTH_FIELDS = ("gt", "answer", "truth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(RewardContext):
    ids: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """train, held_out: split by a hash of the conversation. skipped: prompts that are too long for a row. tools: names
    of all tools that any prompt offers."""

    train: list[Prompt]
    held_out: list[Prompt]
    skipped: int
    fingerprint: str
    tools: frozenset[str] = frozenset()


def read(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    max_prompt_tokens: int,
    thinking: bool | None = None,
    default_tools: Sequence[dict[str, Any]] = (),
    bad_records: BadRecords | None = None,
) -> Prompts:
    """Prompts of at most `max_prompt_tokens` tokens. Raises UserError if none is left, and for broken records; these
    are collected in `bad_records` instead if it is given.

    default_tools: the tools of prompts whose records name none. thinking: see `render`.
    """
    parsed: list[tuple[Prompt, float]] = []
    tool_names: set[str] = set()
    for chat, place in corpus.placed(bad_records or NoBadRecords()):
        tools = chat.tools or tuple(default_tools)
        try:
            ids = render(tokenizer, chat.messages, tools, ask=True, thinking=thinking).ids
            prompt = prompt_of(chat, ids, tools)
        except UserError as error:
            if bad_records is None:
                raise
            bad_records.reject(error, chat.source, chat.line)
            continue
        tool_names.update(tool["name"] for tool in tools)
        parsed.append((prompt, place))
    below = threshold((place for _, place in parsed), corpus.split.share)
    splits: dict[bool, list[Prompt]] = {False: [], True: []}
    for prompt, place in parsed:
        if len(prompt.ids) <= max_prompt_tokens:
            splits[place < below].append(prompt)
    skipped = len(parsed) - sum(map(len, splits.values()))
    if not splits[False]:
        wanted = f"prompts of at most {max_prompt_tokens} tokens, or longer rows"
        raise UserError("no prompt fits", where="data.seq_len", wanted=wanted)
    text = json.dumps([[prompt.ids, prompt.truths] for split in splits.values() for prompt in split])
    return Prompts(
        train=splits[False],
        held_out=splits[True],
        skipped=skipped,
        fingerprint=sha256_text(text),
        tools=frozenset(tool_names),
    )


def prompt_of(chat: Chat, ids: Sequence[int] = (), tools: tuple[dict[str, Any], ...] = ()) -> Prompt:
    """The prompt of a record, with the tools on offer. Raises UserError for reference answers that are no texts."""
    where, kind = f"{chat.source}:{chat.line}", str(chat.fields.get("kind", ""))
    name = next((name for name in TRUTH_FIELDS if name in chat.fields), None)
    value = [] if name is None else chat.fields[name]
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
        raise UserError(f"field {name} is not a reference answer", where=where, got=repr(value)[:80], wanted="texts")
    about: dict[str, Any] = {"messages": chat.messages, "tools": tools, "record": chat.fields, "where": where}
    return Prompt(ids=tuple(ids), kind=kind, truths=tuple(map(str, items)), **about)
