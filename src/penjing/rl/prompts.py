"""Prompts with their reference answers, read and held out, in an order of their own each epoch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.chat.render import render
from penjing.data.formats import BadRecords, list_files, read_prompts
from penjing.data.tokenize_dataset import held_out_below, is_held_out, split_key
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.rl.rewards.base import RewardContext

TRUTH_FIELDS = ("gt", "answer", "truth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(RewardContext):
    """One conversation that waits for an answer."""

    ids: tuple[int, ...]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """train, held_out: the two halves, apart by hash of the conversation. skipped: too long for a row.

    tools: the names of all tools that some prompt has on offer.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    skipped: int
    fingerprint: str
    tools: frozenset[str] = frozenset()


def read(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    longest: int,
    held_out_fraction: float,
    thinking: bool | None = None,
    offered: Sequence[dict[str, Any]] = (),
    bad_records: BadRecords | None = None,
) -> Prompts:
    """Prompts of at most `longest` tokens. Raises UserError where no prompt is left, and for broken records, which
    go to `bad_records` where there is one.

    offered: the tools of prompts whose records name none. thinking: as `render` is told.
    """
    found: list[tuple[Prompt, str]] = []
    named: set[str] = set()
    for chat, record in read_prompts(list_files(paths), bad_records=bad_records):
        tools, where = chat.tools or tuple(offered), f"{chat.source}:{chat.line}"
        try:
            prompt = Prompt(
                ids=tuple(render(tokenizer, chat.messages, tools, ask=True, thinking=thinking).ids),
                messages=chat.messages,
                truths=_truths(record, where),
                kind=str(record.get("kind", "")),
                record=record,
                where=where,
            )
        except UserError as error:
            if bad_records is None:
                raise
            bad_records.reject(error, chat.source, chat.line)
            continue
        named.update(tool["name"] for tool in tools)
        found.append((prompt, split_key(chat)))
    below = held_out_below((key for _, key in found), held_out_fraction)
    halves: dict[bool, list[Prompt]] = {False: [], True: []}
    for prompt, key in found:
        if len(prompt.ids) <= longest:
            halves[is_held_out(key, below)].append(prompt)
    skipped = len(found) - sum(map(len, halves.values()))
    if not halves[False]:
        raise UserError(
            "no prompt fits",
            where="data.seq_len",
            wanted=f"prompts of at most {longest} tokens, or longer rows",
        )
    text = json.dumps([[prompt.ids, prompt.truths] for half in halves.values() for prompt in half])
    return Prompts(
        train=halves[False],
        held_out=halves[True],
        skipped=skipped,
        fingerprint=sha256_text(text),
        tools=frozenset(named),
    )


def _truths(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    name = next((name for name in TRUTH_FIELDS if name in record), None)
    if name is None:
        return ()
    value = record[name]
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in listed):
        raise UserError(f"field {name} is no reference answer", where=where, got=repr(value)[:80], wanted="texts")
    return tuple(map(str, listed))
