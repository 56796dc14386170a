"""Prompts with judged answers, as token ids on disk: written once, then memory-mapped.

A folder holds `tokens.bin` (uint16 or uint32: each group's prompt, then its answers, one after the other),
`weights.bin` (uint8 per token: did the model say it), `prompts.npy` (int64 [G, 2]: where each group's prompt begins and
ends), `first.npy` (int64 [G + 1]: its first answer), `ends.npy` (int64 [A]: where each answer ends), `wanted.npy`
(uint8 [A]), `margins.npy` (float32 [G]) and `groups.json` with a checksum of each, written last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.chat.render import render
from penjing.data.formats import BadRecords, Chat, NoBadRecords, PreferenceRecord
from penjing.data.token_shards import ArrayFolder, ArrayFolderWriter
from penjing.data.tokenize_dataset import need_both, write_halves
from penjing.data.tokenizer.tokenizer import Tokenizer

META = "groups.json"


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """ids of an answer, its turn's end included; weights: 1 what the model said, 0 what it was given (tools)."""

    ids: list[int]
    weights: list[int]


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """A prompt, its answers, whether each is wanted, and by how much the first is better."""

    prompt: list[int]
    answers: tuple[TokenAnswer, ...]
    wanted: tuple[bool, ...]
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Positions of prompt and answers, each answer's last token included."""
        return len(self.prompt) + sum(len(answer.ids) for answer in self.answers)


# --- conversations to ids --------------------------------------------------------------------------------------------


def encode(record: PreferenceRecord, tokenizer: Tokenizer) -> TokenGroup:
    """The ids of a pair or of one judged answer; what comes before the answers is read once.

    A pair's answers begin with the assistant's turn in which they first differ, a single one's with the first turn
    after the last question. Raises UserError if the two differ before any answer, or a template leaves one out.
    """
    rendered = [render(tokenizer, chat.messages, chat.tools) for chat in record.chats]
    first = rendered[0]
    if len(rendered) == 1:
        start = _last_answer(record.chats[0], first.weights, tokenizer)
    else:
        other = rendered[1]
        shared = zip(first.ids, other.ids, first.weights, other.weights, strict=False)
        start = next((index for index, (a, b, v, w) in enumerate(shared) if (a, v) != (b, w)), -1)
        if start < 0 or not (first.weights[start] and other.weights[start]):
            chat = record.chats[0]
            raise UserError(
                "chosen and rejected differ before the answer",
                where=f"{chat.source}:{chat.line}",
                wanted="the same messages up to an assistant turn",
            )
        while start and first.weights[start - 1]:
            start -= 1
    assert start > 0, "a template opens the assistant's turn before the answer"
    answers = []
    for whole in rendered:
        end = len(whole.ids)
        while end > start and not whole.weights[end - 1]:  # what a template writes after the turn's end is nobody's
            end -= 1
        if end <= start:
            raise _not_shown(record.chats[0])
        answers.append(TokenAnswer(whole.ids[start:end], whole.weights[start:end]))
    return TokenGroup(first.ids[:start], tuple(answers), record.wanted, record.margin)


def _last_answer(chat: Chat, weights: Sequence[int], tokenizer: Tokenizer) -> int:
    """Where the first assistant turn after the last question begins."""
    messages = chat.messages
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    before: list[int] = []
    if any(message.role == "assistant" for message in messages[:last_user]):
        before = _turns(render(tokenizer, messages[: last_user + 1], chat.tools).weights)
    starts = _turns(weights)[len(before) :]
    if not starts:
        raise _not_shown(chat)
    return starts[0]


def _turns(weights: Sequence[int]) -> list[int]:
    """Where each stretch of what the model said begins."""
    return [index for index, weight in enumerate(weights) if weight and not (index and weights[index - 1])]


def _not_shown(chat: Chat) -> UserError:
    return UserError("the chat template leaves the answer out", where=f"{chat.source}:{chat.line}")


def split_key(record: PreferenceRecord) -> str:
    """The text by whose hash a record is held out: its question, so that all answers to one fall together."""
    messages = record.chats[0].messages
    last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=0)
    return "\n".join(f"{message.role}: {message.content}" for message in messages[: last_user + 1])


# --- reading ---------------------------------------------------------------------------------------------------------


class PreferenceShards(ArrayFolder):
    """A folder of groups: `groups[index]`, `len(groups)`."""

    meta_file, holds = META, "groups"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prompt_G2: npt.NDArray[np.int64] = self.load("prompts")
        self.first_G: npt.NDArray[np.int64] = self.load("first")
        self.end_A: npt.NDArray[np.int64] = self.load("ends")
        self.wanted_A: npt.NDArray[np.uint8] = self.load("wanted")
        self.margin_G: npt.NDArray[np.float32] = self.load("margins")
        self._prompts_G = np.cumsum(self.prompt_G2[:, 1] - self.prompt_G2[:, 0])  # tokens of prompts up to each group
        self._token_N: npt.NDArray[Any] = self.map("tokens", self.meta["dtype"])
        self._weight_N: npt.NDArray[np.uint8] = self.map("weights", "uint8")

    def __len__(self) -> int:
        return len(self.prompt_G2)

    def __getitem__(self, index: int) -> TokenGroup:
        begin, prompt_end = (int(place) for place in self.prompt_G2[index])
        first, last = int(self.first_G[index]), int(self.first_G[index + 1])
        answers = tuple(
            TokenAnswer(self._token_N[start:end].tolist(), self._weight_N[start:end].tolist())
            for start, end in pairwise([prompt_end, *self.end_A[first:last].tolist()])
        )
        wanted = tuple(bool(value) for value in self.wanted_A[first:last])
        prompt = self._token_N[begin:prompt_end].tolist()
        return TokenGroup(prompt, answers, wanted, float(self.margin_G[index]))

    def __iter__(self) -> Iterator[TokenGroup]:
        return (self[index] for index in range(len(self)))

    def answer_places(self, index: int) -> list[slice]:
        """Where each answer of a group stands among the answers' tokens of the whole folder, prompts left out."""
        first, last = int(self.first_G[index]), int(self.first_G[index + 1])
        borders = np.array([self.prompt_G2[index, 1], *self.end_A[first:last]]) - self._prompts_G[index]
        return [slice(start, end) for start, end in pairwise(borders.tolist())]

    @property
    def has_pairs(self) -> bool:
        """Whether every group is a pair."""
        return bool((np.diff(self.first_G) == 2).all())

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of all files: tokens, labels and margins alike."""
        return sha256_text("\n".join(f"{name} {facts['sha256']}" for name, facts in sorted(self.meta["files"].items())))


# --- writing ---------------------------------------------------------------------------------------------------------


class PreferenceShardWriter(ArrayFolderWriter):
    """Writes a folder of groups."""

    def __init__(self, folder: Path, *, vocab_size: int, about: dict[str, Any]) -> None:
        super().__init__(folder, has_weights=True, vocab_size=vocab_size, about=about)
        self._prompts: list[tuple[int, int]] = []
        self._first, self._ends, self._wanted, self._margins = [0], list[int](), list[bool](), list[float]()

    def add(self, group: TokenGroup) -> None:
        begin = self.num_tokens
        self.append(group.prompt, [0] * len(group.prompt))
        self._prompts.append((begin, self.num_tokens))
        for answer in group.answers:
            self.append(answer.ids, answer.weights)
            self._ends.append(self.num_tokens)
        self._first.append(len(self._ends))
        self._wanted += group.wanted
        self._margins.append(group.margin)

    def close(self) -> PreferenceShards:
        arrays: dict[str, npt.NDArray[Any]] = {
            "prompts": np.asarray(self._prompts, dtype=np.int64).reshape(-1, 2),
            "first": np.asarray(self._first, dtype=np.int64),
            "ends": np.asarray(self._ends, dtype=np.int64),
            "wanted": np.asarray(self._wanted, dtype=np.uint8),
            "margins": np.asarray(self._margins, dtype=np.float32),
        }
        self.finish(META, arrays, {"groups": len(self._prompts), "answers": len(self._ends)})
        return PreferenceShards(self.folder)


@dataclass(frozen=True, slots=True)
class PreparedPreferences:
    """Where the two halves went, and how many were longer than a row."""

    train: PreferenceShards
    validation: PreferenceShards
    too_long: int


def prepare_groups(
    records: Iterable[PreferenceRecord],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    val_fraction: float,
    about: dict[str, Any],
    bad_records: BadRecords | None = None,
) -> PreparedPreferences:
    """Encode judged answers into `folder/train` and `folder/validation`; a share of the questions is held out by hash.

    A group of more than `seq_len` tokens is left out and counted; one that cannot be encoded goes to `bad_records`.
    Raises UserError if one half stays empty.
    """
    too_long = 0

    def encoded() -> Iterator[tuple[str, tuple[TokenGroup]]]:
        nonlocal too_long
        for record in records:
            try:
                group = encode(record, tokenizer)
            except UserError as error:
                (bad_records or NoBadRecords()).reject(error, record.chats[0].source, record.chats[0].line)
                continue
            if group.num_tokens > seq_len:
                too_long += 1
            else:
                yield split_key(record), (group,)

    about = {**about, "seq_len": seq_len}
    train, validation = write_halves(encoded(), PreferenceShardWriter, tokenizer, folder, val_fraction, about)
    longer = f"{too_long} were longer than data.seq_len={seq_len}. " if too_long else ""
    need_both(train, validation, f"{longer}Give more: answers to at least two different questions that fit.")
    return PreparedPreferences(train, validation, too_long)
