"""Records to shards: encode, hold out a share by hash of the text, write. Documents for pretraining, chats for SFT."""

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

BATCH = 512  # documents encoded at once; ids of more than a few thousand documents would crowd the memory
SPLIT_SEED = 0  # fixed, so that a text is held out by every run or by none


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """Where the two halves went, and what did not fit. `meta["held_out_below"]` of both says how they were split."""

    train: TokenShards
    validation: TokenShards
    skipped: int  # chats of which not even the first exchange fits a row
    shortened: int  # chats that lost their last turns to the row's length


# --- the split -------------------------------------------------------------------------------------------------------


def split_key(record: Document | Chat) -> str:
    """The text by whose hash a record is held out or not."""
    if isinstance(record, Document):
        return record.text
    return "\n".join(f"{message.role}: {message.content}" for message in record.messages)


def _hash(text: str) -> float:
    return fraction(SPLIT_SEED, "held out", text)


def is_held_out(text: str, below: float) -> bool:
    """Whether a text belongs to the validation half: a pure function of the text, so copies of it fall together."""
    return _hash(text) < below


def held_out_below(texts: Iterable[str], share: float) -> float:
    """The hash below which texts are held out: `share`, wherever that leaves something in both halves.

    A handful of texts may all fall on one side; then the text with the smallest hash alone is held out, if there are
    at least two different ones. Reads no further than it must.
    """
    lowest, highest = 1.0, 0.0
    for place in map(_hash, texts):
        lowest, highest = min(lowest, place), max(highest, place)
        if lowest < share <= highest:
            return share
    return math.nextafter(lowest, 1.0) if lowest < highest else share


# --- encoding --------------------------------------------------------------------------------------------------------

_GIVE_MORE = "Give more text: at least two different ones that fit."
Encoded = tuple[str, tuple[Sequence[int], int, Sequence[int] | None]]  # key; ids, bytes of text, weights


def prepare_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    val_fraction: float,
    about: dict[str, Any],
) -> TokenizedDataset:
    """Encode documents into `folder/train` and `folder/validation`. Raises UserError if one half stays empty."""
    encoded = _encode_documents(documents, tokenizer)
    writer = partial(TokenShardWriter, kind="documents")
    halves = write_halves(encoded, writer, tokenizer, folder, val_fraction, about)
    need_both(*halves, _GIVE_MORE)
    return TokenizedDataset(*halves, 0, 0)


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

    A longer one loses whole turns from its end; one whose first exchange is too long is skipped. Both are counted.
    bad_records: where a conversation goes that the template refuses or that teaches nothing; None: it is an error.
    thinking: as `render` is told; not None, answers without a thought are written with an empty one.
    Raises UserError if one half stays empty, and for `thinking` where somebody else's template decides.
    """
    if thinking is not None and not tokenizer.is_ours:
        raise UserError(
            "has no effect: this tokenizer's own chat template says how thoughts are written",
            where="data.thinking",
            next_step="Leave it out.",
        )
    counts: Counter[str] = Counter()
    encoded = _encode_chats(chats, tokenizer, seq_len, thinking, counts, bad_records)
    writer = partial(TokenShardWriter, kind="chats")
    halves = write_halves(encoded, writer, tokenizer, folder, val_fraction, {**about, "seq_len": seq_len})
    need_both(*halves, _GIVE_MORE)
    return TokenizedDataset(*halves, counts["skipped"], counts["shortened"])


def _encode_documents(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    stream = iter(documents)
    opening = [] if tokenizer.begin == tokenizer.end_of_text else [tokenizer.begin]
    while batch := list(islice(stream, BATCH)):
        for document, ids in zip(batch, tokenizer.encode_many([document.text for document in batch]), strict=True):
            if ids:
                ids = [*opening, *ids] if opening else ids
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
            fitting = _fit(tokenizer, chat, seq_len + 1, thinking)
            silent = fitting is not None and not any(fitting[0].weights)
            if silent and not any(_says_something(message) for message in chat.messages):
                raise UserError("all of its tokens have weight 0", where=f"{chat.source}:{chat.line}")
        except UserError as error:
            (bad_records or NoBadRecords()).reject(error, chat.source, chat.line)
            continue
        if fitting is None or silent:  # silent: there are templates that show no tool calls
            counts["skipped"] += 1
            continue
        rendered, messages, shorter = fitting
        counts["shortened"] += shorter
        answers = "".join(message.content for message in messages if message.role == "assistant")
        yield split_key(chat), (rendered.ids, len(answers.encode()), rendered.weights)


def _says_something(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content or message.tool_calls or message.reasoning_content)


def _fit(
    tokenizer: Tokenizer, chat: Chat, max_tokens: int, thinking: bool | None
) -> tuple[EncodedChat, tuple[Message, ...], bool] | None:
    """As many whole exchanges as fit in `max_tokens` ids, and whether any were dropped; None if not one fits."""
    for count, messages in enumerate(_shorter(chat.messages)):
        rendered = render(tokenizer, messages, chat.tools, thinking=thinking)
        if len(rendered.ids) <= max_tokens:
            return rendered, messages, count > 0
    return None


def _shorter(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The conversation, then without its last exchange, and so on; each ends with what the assistant says."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].role == "assistant" and (end == len(messages) or messages[end].role != "tool"):
            yield messages[:end]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_halves(
    keyed: Iterable[tuple[str, tuple[Any, ...]]],
    writer: Callable[..., Any],
    tokenizer: Tokenizer,
    folder: Path,
    val_fraction: float,
    about: dict[str, Any],
) -> tuple[Any, Any]:
    """The closed writers of `folder/train` and `folder/validation`, in the order of `keyed`.

    keyed: by what text each record is held out, and what is `add`ed of it. Few wait in memory: those before both
    halves have one.
    """
    stream, waiting = iter(keyed), list[tuple[str, tuple[Any, ...]]]()

    def keys() -> Iterator[str]:
        for one in stream:
            waiting.append(one)
            yield one[0]

    below = held_out_below(keys(), val_fraction)
    about = {**about, "tokenizer": tokenizer.fingerprint, "val_fraction": val_fraction, "held_out_below": below}
    train, validation = (
        writer(folder / name, vocab_size=tokenizer.size, about={**about, "split": name})
        for name in ("train", "validation")
    )
    for key, record in chain(waiting, stream):
        (validation if is_held_out(key, below) else train).add(*record)
    return train.close(), validation.close()


def need_both(train: ArrayFolder, validation: ArrayFolder, next_step: str) -> None:
    """Raise UserError for the half that is empty."""
    for half in (train, validation):
        if not half.num_tokens:
            raise UserError(f"nothing was left for the {half.folder.name} half", where=half.folder, next_step=next_step)
