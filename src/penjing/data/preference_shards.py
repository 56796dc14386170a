"""Prompts with judged answers, as token ids on disk: written once, then memory-mapped.

A folder holds `tokens.bin` (uint16 or uint32: each group's prompt, then its answers, one after the other),
`weights.bin` (uint8 per token: did the model say it), `prompts.npy` (int64 [G, 2]: where each group's prompt begins and
ends), `first.npy` (int64 [G + 1]: its first answer), `ends.npy` (int64 [A]: where each answer ends), `wanted.npy`
(uint8 [A]), `margins.npy` (float32 [G]) and `groups.json` with a checksum of each, written last.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.files import disk_error, sha256_file, sha256_text, write_json
from penjing.data.chat.render import render
from penjing.data.formats import BadRecords, Chat, PreferenceRecord
from penjing.data.token_shards import check_hashes, publish, read_meta
from penjing.data.tokenize_dataset import held_out_below, is_held_out
from penjing.data.tokenizer.tokenizer import Tokenizer

FORMAT = 1
META = "groups.json"
ARRAYS = ("prompts", "first", "ends", "wanted", "margins")


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


class PreferenceShards:
    """A folder of groups, memory-mapped for reading: `groups[index]`, `len(groups)`."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder is not one of groups, or a file's size is not what was written."""
        self.folder = Path(folder)
        self.meta = read_meta(self.folder, META, FORMAT, what="groups")
        self.prompt_G2: npt.NDArray[np.int64] = self._load("prompts")
        self.first_G: npt.NDArray[np.int64] = self._load("first")
        self.end_A: npt.NDArray[np.int64] = self._load("ends")
        self.wanted_A: npt.NDArray[np.uint8] = self._load("wanted")
        self.margin_G: npt.NDArray[np.float32] = self._load("margins")
        self._prompts_G = np.cumsum(self.prompt_G2[:, 1] - self.prompt_G2[:, 0])  # tokens of prompts up to each group
        self._token_N: npt.NDArray[Any] = self._map("tokens.bin", self.meta["dtype"])
        self._weight_N: npt.NDArray[np.uint8] = self._map("weights.bin", "uint8")

    def _load(self, name: str) -> npt.NDArray[Any]:
        try:
            return np.asarray(np.load(self.folder / f"{name}.npy"))
        except Exception as error:  # a damaged header raises ValueError, SyntaxError, TokenError, EOFError ...
            raise UserError(f"the file is damaged: {error}", where=self.folder / f"{name}.npy") from None

    def _map(self, name: str, dtype: str) -> npt.NDArray[Any]:
        if self.meta["tokens"] == 0:
            return np.zeros(0, dtype)
        return np.memmap(self.folder / name, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self.prompt_G2)

    def __getitem__(self, index: int) -> TokenGroup:
        begin, prompt_end = (int(place) for place in self.prompt_G2[index])
        first, last = int(self.first_G[index]), int(self.first_G[index + 1])
        answers, start = [], prompt_end
        for end in map(int, self.end_A[first:last]):
            part = slice(start, end)
            answers.append(TokenAnswer(self._token_N[part].tolist(), self._weight_N[part].tolist()))
            start = end
        wanted = tuple(bool(value) for value in self.wanted_A[first:last])
        prompt = self._token_N[begin:prompt_end].tolist()
        return TokenGroup(prompt, tuple(answers), wanted, float(self.margin_G[index]))

    def __iter__(self) -> Iterator[TokenGroup]:
        return (self[index] for index in range(len(self)))

    def answer_places(self, index: int) -> list[slice]:
        """Where each answer of a group stands among the answers' tokens of the whole folder, prompts left out."""
        first, last = int(self.first_G[index]), int(self.first_G[index + 1])
        ends = (self.end_A[first:last] - self._prompts_G[index]).tolist()
        starts = [int(self.prompt_G2[index, 1] - self._prompts_G[index]), *ends[:-1]]
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.meta["tokens"]) - (int(self._prompts_G[-1]) if len(self) else 0)

    @property
    def has_pairs(self) -> bool:
        """Whether every group is a pair."""
        return bool((np.diff(self.first_G) == 2).all())

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of all files: tokens, labels and margins alike."""
        return sha256_text("\n".join(f"{name} {facts['sha256']}" for name, facts in sorted(self.meta["files"].items())))

    def verify(self) -> None:
        """Hash every file again; raises UserError naming the first that changed."""
        check_hashes(self.folder, self.meta)


# --- writing ---------------------------------------------------------------------------------------------------------


class PreferenceShardWriter:
    """Writes a folder of groups: `add` them, then `close`. Until then only `FOLDER.partial` exists."""

    def __init__(self, folder: Path, *, vocab_size: int, about: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.about = about
        self._prompts: list[tuple[int, int]] = []
        self._first, self._ends, self._wanted, self._margins = [0], list[int](), list[bool](), list[float]()
        self._num_tokens = 0
        try:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            self._tokens = open(self.partial / "tokens.bin", "wb")
            self._weights = open(self.partial / "weights.bin", "wb")
        except OSError as error:
            raise disk_error(error, self.partial) from error

    def add(self, group: TokenGroup) -> None:
        ids = [*group.prompt, *(token for answer in group.answers for token in answer.ids)]
        weights = [0] * len(group.prompt) + [weight for answer in group.answers for weight in answer.weights]
        try:
            self._tokens.write(np.asarray(ids, dtype=self.dtype).tobytes())
            self._weights.write(np.asarray(weights, dtype=np.uint8).tobytes())
        except OSError as error:
            raise disk_error(error, self.partial) from error
        place = self._num_tokens + len(group.prompt)
        self._prompts.append((self._num_tokens, place))
        for answer in group.answers:
            place += len(answer.ids)
            self._ends.append(place)
        self._num_tokens = place
        self._first.append(len(self._ends))
        self._wanted += group.wanted
        self._margins.append(group.margin)

    def close(self) -> PreferenceShards:
        """Finish the files, then give the folder its name; an older folder of that name is replaced."""
        try:
            self._tokens.close()
            self._weights.close()
            arrays: dict[str, npt.NDArray[Any]] = {
                "prompts": np.asarray(self._prompts, dtype=np.int64).reshape(-1, 2),
                "first": np.asarray(self._first, dtype=np.int64),
                "ends": np.asarray(self._ends, dtype=np.int64),
                "wanted": np.asarray(self._wanted, dtype=np.uint8),
                "margins": np.asarray(self._margins, dtype=np.float32),
            }
            assert tuple(arrays) == ARRAYS
            for name, values in arrays.items():
                np.save(self.partial / f"{name}.npy", values)
            files = {
                name: {"bytes": (self.partial / name).stat().st_size, "sha256": sha256_file(self.partial / name)}
                for name in ["tokens.bin", "weights.bin", *(f"{name}.npy" for name in ARRAYS)]
            }
        except OSError as error:
            raise disk_error(error, self.partial) from error
        counts = {"tokens": self._num_tokens, "groups": len(self._prompts), "answers": len(self._ends)}
        write_json(
            self.partial / META, {"format": FORMAT, "dtype": self.dtype.name, **counts, **self.about, "files": files}
        )
        publish(self.partial, self.folder)
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
    counts: Counter[str] = Counter()
    waiting: list[tuple[str, TokenGroup]] = []  # few: those read before both halves have one

    def encoded() -> Iterator[tuple[str, TokenGroup]]:
        for record in records:
            try:
                group = encode(record, tokenizer)
            except UserError as error:
                if bad_records is None:
                    raise
                bad_records.reject(error, record.chats[0].source, record.chats[0].line)
                continue
            if group.num_tokens > seq_len:
                counts["too long"] += 1
            else:
                yield split_key(record), group

    stream = encoded()

    def keys() -> Iterator[str]:
        for one in stream:
            waiting.append(one)
            yield one[0]

    below = held_out_below(keys(), val_fraction)
    about = {
        **about,
        "tokenizer": tokenizer.fingerprint,
        "seq_len": seq_len,
        "val_fraction": val_fraction,
        "held_out_below": below,
    }
    writers = [
        PreferenceShardWriter(folder / name, vocab_size=tokenizer.size, about={**about, "split": name})
        for name in ("train", "validation")
    ]
    for key, group in chain(waiting, stream):
        writers[is_held_out(key, below)].add(group)
    train, validation = (writer.close() for writer in writers)
    for half in (train, validation):
        if not len(half):
            too_long = f"{counts['too long']} were longer than data.seq_len={seq_len}. " if counts else ""
            raise UserError(
                f"nothing was left for the {half.folder.name} half",
                where=half.folder,
                next_step=f"{too_long}Give more: answers to at least two different questions that fit.",
            )
    return PreparedPreferences(train, validation, counts["too long"])
