"""Tokenize records into shards and split off a validation set by hash: documents for pretraining, chats for SFT."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penjing.base.errors import UserError
from penjing.data.chat.render import EncodedChat, render
from penjing.data.corpus import BEGINNING, END, Placed, Split, threshold
from penjing.data.formats import BadRecords, Chat, Message, NoBadRecords
from penjing.data.token_shards import FileRange, TokenShards, TokenShardWriter
from penjing.data.tokenizer.bulk import BulkEncoder
from penjing.data.tokenizer.tokenizer import Tokenizer

BATCH, BATCH_CHARACTERS = 512, 4 << 20  # documents encoded at once: at most so many, and not many more characters
Encoded = tuple[float, str, tuple[Any, ...]]  # place in the split, file, and the arguments of the writer's `add`


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """The two splits, and the records that did not fit. `meta["held_out_below"]` of both is the split threshold."""

    train: Any  # a subclass of ArrayFolder
    validation: Any
    skipped: int = 0  # records that do not fit a row: chats with their first exchange, preferences whole
    shortened: int = 0  # chats whose last turns were dropped to fit a row

    @property
    def held_out_share(self) -> float:
        """Of all tokens."""
        return float(self.validation.num_tokens / (self.train.num_tokens + self.validation.num_tokens))


_OR_ELSE = " Or give data.validation=FILE, or data.validation=none for no held-out loss."


def prepare_documents(
    documents: Iterable[Placed],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    split: Split,
    about: dict[str, Any],
    bad_records: BadRecords | None = None,
    kept: "Kept | None" = None,
) -> TokenizedDataset:
    """Encode documents, with their places (`Corpus.placed`), into `folder/train` and `folder/validation`.

    kept: tokens made before. bad_records: not used, as every text can be encoded. Raises UserError if a split is empty.
    """
    encoded = _encode_documents(kept.others(documents) if kept else documents, tokenizer)
    writer = partial(TokenShardWriter, kind="documents")
    splits = write_splits(encoded, writer, tokenizer, folder, split, about, lambda: "Give more text.", kept)
    return TokenizedDataset(*splits)


def prepare_chats(
    chats: Iterable[Placed],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    seq_len: int,
    split: Split,
    about: dict[str, Any],
    thinking: bool | None = None,
    bad_records: BadRecords | None = None,
    kept: "Kept | None" = None,
) -> TokenizedDataset:
    """Render conversations into `folder/train` and `folder/validation`, each short enough for a row of `seq_len`.

    A longer one loses whole turns at its end; one whose first exchange is too long is skipped. Both are counted.
    bad_records: gets conversations that the template refuses or that have no token to learn; None: they are errors.
    kept: tokens made before. thinking: as in `render`; if not None, answers without a thought are written with an empty
    one.
    Raises UserError if a split is empty, and for `thinking` with a template that is not ours.
    """
    if thinking is not None and not tokenizer.is_ours:
        what = "has no effect: this tokenizer's own chat template decides how thoughts are written"
        raise UserError(what, where="data.thinking", next_step="Leave it out.")
    bad_records = bad_records or NoBadRecords()
    skipped = shortened = shortest = 0  # shortest: of the conversations that do not fit

    def encoded() -> Iterator[Encoded]:
        nonlocal skipped, shortened, shortest
        for chat, place in kept.others(chats) if kept else chats:
            try:
                fitted, length = _truncate_to_fit(tokenizer, chat, seq_len + 1, thinking)
                is_unscored = fitted is not None and not any(fitted[0].weights)
                answers = [message for message in chat.messages if message.role == "assistant"]
                if is_unscored and not any(answer.text or answer.tool_calls for answer in answers):
                    raise UserError("all of its tokens have weight 0", where=f"{chat.source}:{chat.line}")
            except UserError as error:
                bad_records.reject(error, chat.source, chat.line)
                continue
            if fitted is None or is_unscored:  # some templates do not render tool calls
                skipped += 1
                if fitted is None or fitted[2]:  # too long, or what is left of it teaches nothing
                    shortest = min(shortest or length, length)
                continue
            rendered, messages, is_shortened = fitted
            shortened += is_shortened
            learned = (message for message in messages if message.role == "assistant" and message.is_target)
            num_bytes = sum(len(message.text.encode()) for message in learned)
            yield place, chat.source, (rendered.ids, num_bytes, rendered.weights)

    def next_step() -> str:
        if not shortest:
            return "Give more conversations."
        wanted = f"The shortest needs {shortest - 1:,}: raise data.seq_len, or give shorter ones."
        return f"{skipped:,} conversations are longer than data.seq_len={seq_len}. {wanted}"

    writer = partial(TokenShardWriter, kind="chats")
    about = {**about, "seq_len": seq_len}
    splits = write_splits(encoded(), writer, tokenizer, folder, split, about, next_step, kept)
    return TokenizedDataset(*splits, skipped=skipped, shortened=shortened)


def _encode_documents(documents: Iterable[Placed], tokenizer: Tokenizer) -> Iterator[Encoded]:
    encoder = BulkEncoder(tokenizer)
    prefix = np.array([] if tokenizer.begin == tokenizer.end_of_text else [tokenizer.begin], dtype=np.uint32)
    for batch in _batches(documents):
        encoded = encoder.encode([document.text for document, _ in batch])
        for (document, place), ids in zip(batch, encoded, strict=True):
            if len(ids):
                ids = np.concatenate((prefix, ids)) if len(prefix) else ids
                yield place, document.source, (ids, len(document.text.encode()), None)


def _batches(documents: Iterable[Placed]) -> Iterator[list[Placed]]:
    batch, num_characters = list[Placed](), 0
    for document, place in documents:
        batch.append((document, place))
        num_characters += len(document.text)
        if len(batch) >= BATCH or num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _truncate_to_fit(
    tokenizer: Tokenizer, chat: Chat, max_tokens: int, thinking: bool | None
) -> tuple[tuple[EncodedChat, tuple[Message, ...], bool] | None, int]:
    """The longest run of exchanges that fits, and whether any was dropped; None if none fits. Then the length that one
    of more would need: of the whole, or of the shortest run if none fits."""
    whole = length = 0
    for count, messages in enumerate(_prefixes(chat.messages)):
        rendered = render(tokenizer, messages, chat.tools, thinking=thinking)
        length = len(rendered.ids)
        whole = whole or length
        if length <= max_tokens:
            return (rendered, messages, count > 0), whole
    return None, length


def _prefixes(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The conversation, then without its last exchange, and so on; each ends with an assistant turn."""
    for end in range(len(messages), 0, -1):
        if messages[end - 1].role == "assistant" and (end == len(messages) or messages[end].role != "tool"):
            yield messages[:end]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_splits(
    placed: Iterable[Encoded],
    writer: Callable[..., Any],
    tokenizer: Tokenizer,
    folder: Path,
    split: Split,
    about: dict[str, Any],
    next_step: Callable[[], str],
    kept: "Kept | None" = None,
) -> tuple[Any, Any]:
    """The closed writers of `folder/train` and `folder/validation`, in the order of `placed`.

    Records are buffered only until both splits have one. kept: tokens made before, of files that `placed` leaves out.
    Raises UserError with `next_step` if a split is empty.
    """
    stream, buffered = iter(placed), list[Encoded]()

    def places() -> Iterator[float]:
        for item in stream:
            buffered.append(item)
            yield item[0]

    below = kept.below if kept else split.below
    if below is None:
        below = threshold(places(), split.share)
    about = {**about, "tokenizer": tokenizer.fingerprint, "val_fraction": split.share, "held_out_below": below}
    train, validation = (
        writer(folder / name, vocab_size=tokenizer.size, about={**about, "split": name})
        for name in ("train", "validation")
    )
    for place, file, record in chain(buffered, stream):
        half = validation if place < below else train
        if kept and (not half.files or half.files[-1].name != file):
            kept.copy(half, before=file)
        half.begin(file, place)
        half.add(*record)
    if kept:
        kept.copy(train)
        kept.copy(validation)
    splits = train.close(), validation.close()
    for half in splits:
        if not half.num_tokens and not (split.may_be_empty and half is splits[1]):
            hint = next_step() + (_OR_ELSE if half is splits[1] else "")
            raise UserError(f"nothing was left for the {half.folder.name} split", where=half.folder, next_step=hint)
    return splits


class Kept:
    """Tokens of files that were encoded before, with the same tokenizer and settings: they are copied."""

    def __init__(self, folder: Path, below: float, old: Mapping[str, str], now: Mapping[str, str]) -> None:
        """folder: of both splits. old, now: SHA-256 of each file that was encoded, and of each that is to be, in order.

        A file is kept if `below` splits its records as they were split.
        """
        self.below = below
        self._order, old_names = list(now), {content: name for name, content in old.items()}
        self._old = {half: TokenShards(folder / half) for half in ("train", "validation")}
        entries = {half: shards.files() for half, shards in self._old.items()}
        self._kept: dict[str, dict[str, FileRange]] = {}  # by file and split
        for name, content in now.items():
            old_name = old_names.get(content, "")
            halves = {half: files[old_name] for half, files in entries.items() if old_name in files}
            if halves and all(_is_split_by(below, file, half == "validation") for half, file in halves.items()):
                self._kept[name] = halves
        self._num_copied = dict.fromkeys(self._old, 0)

    def __len__(self) -> int:
        return len(self._kept)

    def others(self, placed: Iterable[Placed]) -> Iterator[Placed]:
        """The records of the files that are not kept."""
        return ((record, place) for record, place in placed if record.source not in self._kept)

    def copy(self, writer: TokenShardWriter, before: str | None = None) -> None:
        """Copy what is kept of the next files of this split: of those before a file, or of all."""
        half = writer.folder.name
        end = len(self._order) if before is None else self._order.index(before)
        for name in self._order[self._num_copied[half] : end]:
            if half in (halves := self._kept.get(name, {})):
                writer.copy(self._old[half], halves[half], name)
        self._num_copied[half] = max(end, self._num_copied[half])


def _is_split_by(below: float, file: FileRange, held_out: bool) -> bool:
    """Whether a split's records of a file are on the right side, and none is a part of a document."""
    if END in (file.lowest, file.highest) or BEGINNING in (file.lowest, file.highest):
        return False
    return file.highest < below if held_out else file.lowest >= below
