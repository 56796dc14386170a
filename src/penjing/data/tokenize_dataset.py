"""Tokenize records into shards and split off a validation set by hash: documents for pretraining, chats for SFT."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.seeds import fraction
from penjing.data.chat.render import EncodedChat, render
from penjing.data.formats import BadRecords, Chat, Document, Message, NoBadRecords
from penjing.data.token_shards import ArrayFolder, TokenShards, TokenShardWriter
from penjing.data.tokenizer.tokenizer import Tokenizer

BATCH = 512  # documents encoded at once; the ids of many thousand documents would need much memory
SPLIT_SEED = 0  # fixed, so that every run holds out the same texts


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """The two splits, and the chats that did not fit. `meta["held_out_below"]` of both is the split threshold."""

    train: TokenShards
    validation: TokenShards
    skipped: int  # chats whose first exchange does not fit a row
    shortened: int  # chats whose last turns were dropped to fit a row


# --- the split -------------------------------------------------------------------------------------------------------


def split_key(record: Document | Chat) -> str:
    """The text whose hash decides the split of a record."""
    if isinstance(record, Document):
        return record.text
    return "\n".join(f"{message.role}: {message.content}" for message in record.messages)


def _hash(text: str) -> float:
    return fraction(SPLIT_SEED, "held out", text)


def is_held_out(text: str, threshold: float) -> bool:
    """Whether a text belongs to the validation split: a pure function of the text, so copies get the same split."""
    return _hash(text) < threshold


def held_out_below(texts: Iterable[str], share: float) -> float:
    """The hash below which texts are held out: `share`, if that leaves texts in both splits.

    A handful of texts may all fall on one side. Then only the text with the smallest hash is held out, if at least two
    texts differ. Stops reading as soon as the result is known.
    """
    lowest, highest = 1.0, 0.0
    for value in map(_hash, texts):
        lowest, highest = min(lowest, value), max(highest, value)
        if lowest < share <= highest:
            return share
    return math.nextafter(lowest, 1.0) if lowest < highest else share


# --- encoding --------------------------------------------------------------------------------------------------------

_NEED_MORE_TEXT = "Give more text: at least two different ones that fit."
Encoded = tuple[str, tuple[Sequence[int], int, Sequence[int] | None]]  # key; ids, bytes of text, weights


def prepare_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    val_fraction: float,
    about: dict[str, Any],
) -> TokenizedDataset:
    """Encode documents into `folder/train` and `folder/validation`. Raises UserError if a split is empty."""
    encoded = _encode_documents(documents, tokenizer)
    writer = partial(TokenShardWriter, kind="documents")
    splits = write_splits(encoded, writer, tokenizer, folder, val_fraction, about)
    check_not_empty(*splits, _NEED_MORE_TEXT)
    return TokenizedDataset(*splits, 0, 0)


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
    encoded = _encode_chats(chats, tokenizer, seq_len, thinking, counts, bad_records)
    writer = partial(TokenShardWriter, kind="chats")
    splits = write_splits(encoded, writer, tokenizer, folder, val_fraction, {**about, "seq_len": seq_len})
    check_not_empty(*splits, _NEED_MORE_TEXT)
    return TokenizedDataset(*splits, counts["skipped"], counts["shortened"])


def _encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    stream = iter(documents)
    prefix = [] if tokenizer.begin == tokenizer.end_of_text else [tokenizer.begin]
    while batch := list(islice(stream, BATCH)):
        for document, ids in zip(batch, tokenizer.encode_many([document.text for document in batch]), strict=True):
            if ids:
                ids = [*prefix, *ids] if prefix else ids
                yield split_key(document), (ids, len(document.text.encode()), None)


def _encode_chats(
    chats: Iterable[Chat],
    tokenizer: Tokenizer,
    seq_len: int,
    thinking: bool | None,
    counts: Counter[str],
    bad_records: BadRecords | None,
) -> Iterator[Encoded]:
    for chat in chats:
        try:
            fitted = _truncate_to_fit(tokenizer, chat, seq_len + 1, thinking)
            is_unscored = fitted is not None and not any(fitted[0].weights)
            if is_unscored and not any(_has_content(message) for message in chat.messages):
                raise UserError("all of its tokens have weight 0", where=f"{chat.source}:{chat.line}")
        except UserError as error:
            (bad_records or NoBadRecords()).reject(error, chat.source, chat.line)
            continue
        if fitted is None or is_unscored:  # some templates do not render tool calls
            counts["skipped"] += 1
            continue
        rendered, messages, is_shortened = fitted
        counts["shortened"] += is_shortened
        answers = "".join(message.content for message in messages if message.role == "assistant" and message.is_target)
        yield split_key(chat), (rendered.ids, len(answers.encode()), rendered.weights)


def _has_content(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content or message.tool_calls or message.reasoning_content)


def _truncate_to_fit(
    tokenizer: Tokenizer, chat: Chat, max_tokens: int, thinking: bool | None
) -> tuple[EncodedChat, tuple[Message, ...], bool] | None:
    """The longest run of exchanges that fits in `max_tokens` ids, and whether any was dropped; None if none fits."""
    for count, messages in enumerate(_prefixes(chat.messages)):
        rendered = render(tokenizer, messages, chat.tools, thinking=thinking)
        if len(rendered.ids) <= max_tokens:
            return rendered, messages, count > 0
    return None


def _prefixes(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The conversation, then without its last exchange, and so on; each ends with an assistant turn."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].role == "assistant" and (end == len(messages) or messages[end].role != "tool"):
            yield messages[:end]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_splits(
    keyed: Iterable[tuple[str, tuple[Any, ...]]],
    writer: Callable[..., Any],
    tokenizer: Tokenizer,
    folder: Path,
    val_fraction: float,
    about: dict[str, Any],
) -> tuple[Any, Any]:
    """The closed writers of `folder/train` and `folder/validation`, in the order of `keyed`.

    keyed: (split key, arguments of `add`) of each record. Records are buffered only until both splits have one.
    """
    stream, buffered = iter(keyed), list[tuple[str, tuple[Any, ...]]]()

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
    return train.close(), validation.close()


def check_not_empty(train: ArrayFolder, validation: ArrayFolder, next_step: str) -> None:
    """Raise UserError if a split is empty."""
    for split in (train, validation):
        if not split.num_tokens:
            raise UserError(
                f"nothing was left for the {split.folder.name} split", where=split.folder, next_step=next_step
            )
