"""Records to shards: encode, hold out a share by hash of the text, write. Documents for pretraining, chats for SFT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.seeds import fraction
from penjing.text.chat import Rendered, render
from penjing.text.records import Chat, Document, Message
from penjing.text.shards import Shards, ShardWriter
from penjing.text.tokenizer import Tokenizer

BATCH = 512  # documents encoded at once; ids of more than a few thousand documents would crowd the memory
SPLIT_SEED = 0  # fixed, so that a text is held out by every run or by none


@dataclass(frozen=True, slots=True)
class Prepared:
    """Where the two halves went, and what did not fit."""

    train: Shards
    validation: Shards
    skipped: int  # chats of which not even the first exchange fits a row
    shortened: int  # chats that lost their last turns to the row's length


def is_held_out(text: str, share: float) -> bool:
    """Whether a text belongs to the validation half: a pure function of the text, so copies of it fall together."""
    return fraction(SPLIT_SEED, "held out", text) < share


def prepare_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float,
    about: dict[str, Any],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Prepared:
    """Encode documents into `folder/train` and `folder/validation`. Raises UserError if one half stays empty."""
    about = {**about, "tokenizer": tokenizer.fingerprint, "validation_fraction": validation_fraction}
    writers = _writers(folder, "documents", tokenizer, about)
    stream = iter(documents)
    while batch := list(islice(stream, BATCH)):
        for document, ids in zip(batch, tokenizer.encode_many([document.text for document in batch]), strict=True):
            num_bytes = len(document.text.encode())
            if ids:
                writers[is_held_out(document.text, validation_fraction)].add(ids, num_bytes)
            progress(num_bytes)
    train, validation = writers[False].close(), writers[True].close()
    return _both_filled(Prepared(train, validation, 0, 0))


def prepare_chats(
    chats: Iterable[Chat],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    row_tokens: int,
    validation_fraction: float,
    about: dict[str, Any],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Prepared:
    """Render conversations into `folder/train` and `folder/validation`, each short enough for a row of `row_tokens`.

    A longer one loses whole turns from its end; one whose first exchange is too long is skipped. Both are counted.
    """
    about = {
        **about,
        "tokenizer": tokenizer.fingerprint,
        "row_tokens": row_tokens,
        "validation_fraction": validation_fraction,
    }
    writers = _writers(folder, "chats", tokenizer, about)
    skipped = shortened = 0
    for chat in chats:
        rendered, cut = _fit(tokenizer, chat, row_tokens + 1)
        progress(sum(len(message.content) for message in chat.messages))
        if rendered is None:
            skipped += 1
            continue
        shortened += cut
        said = "".join(message.content for message in chat.messages if message.role == "assistant")
        key = "\n".join(f"{message.role}: {message.content}" for message in chat.messages)
        writers[is_held_out(key, validation_fraction)].add(rendered.ids, len(said.encode()), rendered.weights)
    return _both_filled(Prepared(writers[False].close(), writers[True].close(), skipped, shortened))


def _writers(folder: Path, kind: Any, tokenizer: Tokenizer, about: dict[str, Any]) -> dict[bool, ShardWriter]:
    return {
        held_out: ShardWriter(folder / name, kind=kind, vocabulary_size=tokenizer.size, about={**about, "split": name})
        for held_out, name in ((False, "train"), (True, "validation"))
    }


def _fit(tokenizer: Tokenizer, chat: Chat, max_tokens: int) -> tuple[Rendered | None, bool]:
    """The conversation in at most `max_tokens` ids, whole turns dropped from its end; None if nothing trainable fits."""
    for count, messages in enumerate(_shorter(chat.messages)):
        rendered = render(tokenizer, messages, chat.tools)
        if len(rendered.ids) <= max_tokens:
            return (rendered, count > 0) if any(rendered.weights) else (None, False)
    return None, False


def _shorter(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The conversation, then without its last exchange, and so on; each ends with what the assistant says."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].role == "assistant" and (end == len(messages) or messages[end].role != "tool"):
            yield messages[:end]


def _both_filled(prepared: Prepared) -> Prepared:
    for half, shards in (("train", prepared.train), ("validation", prepared.validation)):
        if shards.num_documents == 0:
            raise UserError(
                f"nothing was left for the {half} half",
                where=shards.folder,
                next_step="Give more text, or change data.validation_fraction.",
            )
    return prepared
