"""Tokenize records into shards and split off a validation set by hash: documents for pretraining, chats for SFT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penjing.base.errors import UserError
from penjing.data.chat.render import EncodedChat, render
from penjing.data.corpus import held_out_below, is_held_out, split_key
from penjing.data.formats import BadRecords, Chat, Document, Message, NoBadRecords
from penjing.data.token_shards import TokenShardWriter
from penjing.data.tokenizer.bulk import BulkEncoder
from penjing.data.tokenizer.tokenizer import Tokenizer

BATCH, BATCH_CHARACTERS = 512, 4 << 20  # documents encoded at once: at most so many, and not many more characters
Encoded = tuple[str, tuple[Any, ...]]  # the split key of a record, and the arguments of the writer's `add`


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """The two splits, and the records that did not fit. `meta["held_out_below"]` of both is the split threshold."""

    train: Any  # a subclass of ArrayFolder
    validation: Any
    skipped: int = 0  # records that do not fit a row: chats with their first exchange, preferences whole
    shortened: int = 0  # chats whose last turns were dropped to fit a row


_NEED_MORE_TEXT = "Give more text: at least two different ones that fit."


def prepare_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    val_fraction: float,
    about: dict[str, Any],
    bad_records: BadRecords | None = None,
) -> TokenizedDataset:
    """Encode documents into `folder/train` and `folder/validation`. Raises UserError if a split is empty.

    bad_records: not used, as every text can be encoded.
    """
    encoded = _encode_documents(documents, tokenizer)
    writer = partial(TokenShardWriter, kind="documents")
    return TokenizedDataset(*write_splits(encoded, writer, tokenizer, folder, val_fraction, about, _NEED_MORE_TEXT))


def prepare_chats(
    chats: Iterable[Chat],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    val_fraction: float,
    about: dict[str, Any],
    thinking: bool | None = None,
    bad_records: BadRecords | None = None,
) -> TokenizedDataset:
    """Render conversations into `folder/train` and `folder/validation`, each short enough for a row of `seq_len`.

    A longer one loses whole turns at its end; one whose first exchange is too long is skipped. Both are counted.
    bad_records: gets conversations that the template refuses or that have no token to learn; None: they are errors.
    thinking: as in `render`; if not None, answers without a thought are written with an empty one.
    Raises UserError if a split is empty, and for `thinking` with a template that is not ours.
    """
    if thinking is not None and not tokenizer.is_ours:
        raise UserError(
            "has no effect: this tokenizer's own chat template decides how thoughts are written",
            where="data.thinking",
            next_step="Leave it out.",
        )
    counts: Counter[str] = Counter()

    lengths: list[int] = []  # of conversations that do not fit: the shortest

    def next_step() -> str:
        if not lengths:
            return _NEED_MORE_TEXT
        wanted = f"The shortest needs {lengths[0] - 1:,}: raise data.seq_len, or give shorter ones. {_NEED_MORE_TEXT}"
        return f"{counts['skipped']:,} conversations are longer than data.seq_len={seq_len}. {wanted}"

    encoded = _encode_chats(chats, tokenizer, seq_len, thinking, counts, lengths, bad_records)
    writer = partial(TokenShardWriter, kind="chats")
    about = {**about, "seq_len": seq_len}
    splits = write_splits(encoded, writer, tokenizer, folder, val_fraction, about, next_step)
    return TokenizedDataset(*splits, **counts)


def _encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    encoder = BulkEncoder(tokenizer)
    prefix = np.array([] if tokenizer.begin == tokenizer.end_of_text else [tokenizer.begin], dtype=np.uint32)
    for batch in _batches(documents):
        for document, ids in zip(batch, encoder.encode([document.text for document in batch]), strict=True):
            if len(ids):
                ids = np.concatenate((prefix, ids)) if len(prefix) else ids
                yield split_key(document), (ids, len(document.text.encode()), None)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, num_characters = list[Document](), 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if len(batch) >= BATCH or num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _encode_chats(
    chats: Iterable[Chat],
    tokenizer: Tokenizer,
    seq_len: int,
    thinking: bool | None,
    counts: Counter[str],
    lengths: list[int],
    bad_records: BadRecords | None,
) -> Iterator[Encoded]:
    for chat in chats:
        try:
            fitted, length = _truncate_to_fit(tokenizer, chat, seq_len + 1, thinking)
            is_unscored = fitted is not None and not any(fitted[0].weights)
            if is_unscored and not any(_has_content(message) for message in chat.messages):
                raise UserError("all of its tokens have weight 0", where=f"{chat.source}:{chat.line}")
        except UserError as error:
            (bad_records or NoBadRecords()).reject(error, chat.source, chat.line)
            continue
        if fitted is None or is_unscored:  # some templates do not render tool calls
            counts["skipped"] += 1
            lengths[:] = [min([length, *lengths])] if fitted is None else lengths
            continue
        rendered, messages, is_shortened = fitted
        counts["shortened"] += is_shortened
        answers = "".join(message.content for message in messages if message.role == "assistant" and message.is_target)
        yield split_key(chat), (rendered.ids, len(answers.encode()), rendered.weights)


def _has_content(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content or message.tool_calls or message.reasoning_content)


def _truncate_to_fit(
    tokenizer: Tokenizer, chat: Chat, max_tokens: int, thinking: bool | None
) -> tuple[tuple[EncodedChat, tuple[Message, ...], bool] | None, int]:
    """The longest run of exchanges that fits in `max_tokens` ids, and whether any was dropped; None if none fits. Then
    the length of the last run that was tried."""
    length = 0
    for count, messages in enumerate(_prefixes(chat.messages)):
        rendered = render(tokenizer, messages, chat.tools, thinking=thinking)
        length = len(rendered.ids)
        if length <= max_tokens:
            return (rendered, messages, count > 0), length
    return None, length


def _prefixes(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The conversation, then without its last exchange, and so on; each ends with an assistant turn."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].role == "assistant" and (end == len(messages) or messages[end].role != "tool"):
            yield messages[:end]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_splits(
    keyed: Iterable[Encoded],
    writer: Callable[..., Any],
    tokenizer: Tokenizer,
    folder: Path,
    val_fraction: float,
    about: dict[str, Any],
    next_step: str | Callable[[], str],
) -> tuple[Any, Any]:
    """The closed writers of `folder/train` and `folder/validation`, in the order of `keyed`.

    Records are buffered only until both splits have one. Raises UserError with `next_step` if a split is empty.
    """
    stream, buffered = iter(keyed), list[Encoded]()

    def keys() -> Iterator[str]:
        for item in stream:
            buffered.append(item)
            yield item[0]

    threshold = held_out_below(keys(), val_fraction)
    about = {**about, "tokenizer": tokenizer.fingerprint, "val_fraction": val_fraction, "held_out_below": threshold}
    train, validation = (
        writer(folder / name, vocab_size=tokenizer.size, about={**about, "split": name})
        for name in ("train", "validation")
    )
    for key, record in chain(buffered, stream):
        (validation if is_held_out(key, threshold) else train).add(*record)
    splits = train.close(), validation.close()
    for split in splits:
        if not split.num_tokens:
            raise UserError(
                f"nothing was left for the {split.folder.name} split",
                where=split.folder,
                next_step=next_step if isinstance(next_step, str) else next_step(),
            )
    return splits
