"""Prompts with labelled answers, as token ids on disk: written once, then memory-mapped.

A folder holds `tokens.bin` (uint16 or uint32: each group's prompt, then its answers), `weights.bin` (uint8 per token: 1
if the model generates it), `prompts.npy` (int64 [G, 2]: begin and end of each group's prompt), `first.npy` (int64
[G + 1]: index of each group's first answer), `ends.npy` (int64 [A]: end of each answer), `wanted.npy` (uint8 [A]: 1 if
chosen), `margins.npy` (float32 [G]) and `groups.json` with a checksum of each, written last.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.files import sha256_text
from penjing.data.chat.render import EncodedChat, render
from penjing.data.clean.rule import place_of
from penjing.data.corpus import Placed, Split
from penjing.data.formats import BadRecords, Chat, NoBadRecords, PreferenceRecord
from penjing.data.token_shards import ArrayFolder, ArrayFolderWriter
from penjing.data.tokenize_dataset import Encoded, TokenizedDataset, write_splits
from penjing.data.tokenizer.tokenizer import Tokenizer

META = "groups.json"
_NO_ANSWER = "the chat template drops the answer"


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """A prompt, its answers with their end-of-turn tokens, whether each is chosen, and by how much the first is better.

    Answers have weight 0 where tools speak.
    """

    prompt: list[int]
    answers: tuple[EncodedChat, ...]
    is_chosen: tuple[bool, ...]
    margin: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Positions of prompt and answers, each answer's last token included."""
        return len(self.prompt) + sum(len(answer.ids) for answer in self.answers)


# --- conversations to ids --------------------------------------------------------------------------------------------


def encode(record: PreferenceRecord, tokenizer: Tokenizer, *, thoughts: bool = True) -> TokenGroup:
    """The ids of a pair or of one labelled answer, with the common prompt once.

    A pair's answers begin at the assistant turn in which they first differ, a single answer at the first assistant turn
    after the last question. thoughts: see `render`. Raises UserError if the pair differs before an assistant turn or
    in left-out thoughts only, or if the template drops an answer.
    """
    rendered = [render(tokenizer, chat.messages, chat.tools, thoughts=thoughts) for chat in record.chats]
    first, where = rendered[0], "{}:{}".format(*place_of(record))
    if len(rendered) == 1:
        starts = _turn_starts(first.weights)[_num_earlier_answers(record.chats[0], tokenizer) :]
        if not starts:
            raise UserError(_NO_ANSWER, where=where)
        answer_start = starts[0]
    else:
        other = rendered[1]
        pairs = zip(first.ids, other.ids, first.weights, other.weights, strict=False)
        answer_start = next((index for index, (a, b, v, w) in enumerate(pairs) if (a, v) != (b, w)), -1)
        if first == other:
            raise UserError("chosen and rejected differ in their thoughts only", where=where, wanted="two answers")
        if answer_start < 0 or not (first.weights[answer_start] and other.weights[answer_start]):
            what, wanted = "chosen and rejected differ before the answer", "the same messages up to an assistant turn"
            raise UserError(what, where=where, wanted=wanted)
        while answer_start and first.weights[answer_start - 1]:
            answer_start -= 1
    assert answer_start > 0, "a template opens the assistant's turn before the answer"
    answers = []
    for encoded in rendered:
        end = len(encoded.ids)
        while end > answer_start and not encoded.weights[end - 1]:  # text of the template after the turn's end
            end -= 1
        if end <= answer_start:
            raise UserError(_NO_ANSWER, where=where)
        answers.append(EncodedChat(encoded.ids[answer_start:end], encoded.weights[answer_start:end]))
    return TokenGroup(first.ids[:answer_start], tuple(answers), record.is_chosen, record.margin)


def _num_earlier_answers(chat: Chat, tokenizer: Tokenizer) -> int:
    """How many spans of tokens with weight 1 stand before the last question."""
    last_user = max((index for index, message in enumerate(chat.messages) if message.role == "user"), default=-1)
    if not any(message.role == "assistant" for message in chat.messages[:last_user]):
        return 0
    return len(_turn_starts(render(tokenizer, chat.messages[: last_user + 1], chat.tools).weights))


def _turn_starts(weights: Sequence[int]) -> list[int]:
    """The start of each span of tokens with weight 1."""
    return [index for index, weight in enumerate(weights) if weight and not (index and weights[index - 1])]


# --- reading ---------------------------------------------------------------------------------------------------------


class PreferenceShards(ArrayFolder):
    """A folder of groups: `groups[index]`, `len(groups)`."""

    meta_file, noun = META, "groups"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prompt_G2: npt.NDArray[np.int64] = self.load("prompts")
        self.first_G: npt.NDArray[np.int64] = self.load("first")
        self.end_A: npt.NDArray[np.int64] = self.load("ends")
        self.is_chosen_A: npt.NDArray[np.uint8] = self.load("wanted")
        self.margin_G: npt.NDArray[np.float32] = self.load("margins")
        self._token_N: npt.NDArray[Any] = self.map("tokens", self.meta["dtype"])
        self._weight_N: npt.NDArray[np.uint8] = self.map("weights", "uint8")

    def __len__(self) -> int:
        return len(self.prompt_G2)

    def __getitem__(self, index: int) -> TokenGroup:
        prompt_begin, prompt_end = (int(position) for position in self.prompt_G2[index])
        first, last = int(self.first_G[index]), int(self.first_G[index + 1])
        answers = tuple(
            EncodedChat(self._token_N[start:end].tolist(), self._weight_N[start:end].tolist())
            for start, end in pairwise([prompt_end, *self.end_A[first:last].tolist()])
        )
        is_chosen = tuple(bool(value) for value in self.is_chosen_A[first:last])
        prompt = self._token_N[prompt_begin:prompt_end].tolist()
        return TokenGroup(prompt, answers, is_chosen, float(self.margin_G[index]))

    def __iter__(self) -> Iterator[TokenGroup]:
        return (self[index] for index in range(len(self)))

    @property
    def has_pairs(self) -> bool:
        return bool((np.diff(self.first_G) == 2).all())

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of all files: tokens, labels and margins alike."""
        return sha256_text("\n".join(f"{name} {entry['sha256']}" for name, entry in sorted(self.meta["files"].items())))


# --- writing ---------------------------------------------------------------------------------------------------------


class PreferenceShardWriter(ArrayFolderWriter):
    def __init__(self, folder: Path, *, vocab_size: int, about: dict[str, Any]) -> None:
        super().__init__(folder, has_weights=True, vocab_size=vocab_size, about=about)
        self._prompts: list[tuple[int, int]] = []
        self._first, self._ends, self._is_chosen, self._margins = [0], list[int](), list[bool](), list[float]()

    def add(self, group: TokenGroup) -> None:
        begin = self.num_tokens
        self.append(group.prompt, [0] * len(group.prompt))
        self._prompts.append((begin, self.num_tokens))
        for answer in group.answers:
            self.append(answer.ids, answer.weights)
            self._ends.append(self.num_tokens)
        self._first.append(len(self._ends))
        self._is_chosen += group.is_chosen
        self._margins.append(group.margin)
        self.num_records += 1

    def close(self) -> PreferenceShards:
        prompts, first = np.asarray(self._prompts, np.int64).reshape(-1, 2), np.asarray(self._first, np.int64)
        arrays = {"prompts": prompts, "first": first, "ends": np.asarray(self._ends, np.int64)}
        arrays |= {"wanted": np.asarray(self._is_chosen, np.uint8), "margins": np.asarray(self._margins, np.float32)}
        self.finish(META, arrays, {"groups": len(self._prompts), "answers": len(self._ends)})
        return PreferenceShards(self.folder)


def prepare_groups(
    records: Iterable[Placed],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    split: Split,
    about: dict[str, Any],
    bad_records: BadRecords | None = None,
    thoughts: bool = True,
) -> TokenizedDataset:
    """Encode labelled answers into `folder/train` and `folder/validation`; questions are split by hash.

    A group of more than `seq_len` tokens is skipped and counted; one that cannot be encoded goes to `bad_records`.
    thoughts: see `encode`.
    Raises UserError if a split is empty.
    """
    bad_records = bad_records or NoBadRecords()
    too_long = 0

    def encoded_groups() -> Iterator[Encoded]:
        nonlocal too_long
        for record, place in records:
            source = record.chats[0]
            try:
                group = encode(record, tokenizer, thoughts=thoughts)
            except UserError as error:
                bad_records.reject(error, source.source, source.line)
                continue
            if group.num_tokens > seq_len:
                too_long += 1
            else:
                yield place, source.source, (group,)

    def next_step() -> str:
        note = f"{too_long} were longer than data.seq_len={seq_len}. " if too_long else ""
        return f"{note}Give more: answers to at least two different questions that fit."

    about = {**about, "seq_len": seq_len, "thoughts": thoughts}
    splits = write_splits(encoded_groups(), PreferenceShardWriter, tokenizer, folder, split, about, next_step)
    return TokenizedDataset(*splits, skipped=too_long)
