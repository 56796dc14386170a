"""The texts of a run: from its settings to files, records, the texts that are held out, and a fingerprint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from penjing.base.config import Fraction, NonNegativeInt, Settings
from penjing.base.errors import UserError
from penjing.base.files import printable, read_json, sha256_file, sha256_text
from penjing.base.seeds import fraction
from penjing.data.clean.pipeline import Pipeline
from penjing.data.clean.rule import Record, texts_of
from penjing.data.formats import READERS, BadRecords, Chat, Document, Kind, Message, list_files
from penjing.data.formats.fields import parse_columns
from penjing.data.progress import Show, watch


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Training data."""

    section: ClassVar = "data"

    train: tuple[str, ...] = ()  # files or folders of text or chats, or one folder of token shards
    # documents: learn full texts. chats: learn the assistant's turns. preferences: pairs. prompts: the model answers.
    format: Kind = "documents"
    # Fields of the records by our names, such as instruction:question,output:answer; empty: by the names they have.
    columns: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()  # cleaning rules in their order, a shipped pipeline (default), or a TOML file of rules
    seq_len: Annotated[int, Ge(8)] = 512  # T, positions of one packed row (the classic script's max_seq_len)
    # For few conversations: rows are shortened below `seq_len`, at most to this length and to the longest conversation,
    # until an epoch has 25 rows and the run batch.min_steps steps. 0 = always `seq_len`.
    min_seq_len: NonNegativeInt = 0
    # Documents (chats are never cut): `best_fit` keeps each in one row if it fits, `concat` cuts every T tokens and has
    # no packing cost, for corpora of many millions of documents.
    packing: Literal["best_fit", "concat"] = "best_fit"
    # Documents: `as_given` keeps the order of the files, for a curriculum; `shuffled` draws a new order each epoch.
    order: Literal["shuffled", "as_given"] = "shuffled"
    # Chats: `switch` adds an empty thought to answers without one, so that thinking can be switched off later.
    thinking: Literal["as_given", "switch"] = "as_given"
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.01  # of the texts, held out by hash
    prefetch: NonNegativeInt = 2  # batches prepared ahead in a background thread; 0 = no thread
    # largest fraction of broken records, which are skipped and listed in bad_records.jsonl
    max_bad_fraction: Fraction = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_columns(self.columns)
        if self.thinking == "switch" and self.format != "chats":
            raise UserError("has no effect", where="data.thinking", got=f"data.format={self.format}", wanted="chats")
        if self.order == "as_given" and self.format != "documents":
            raise UserError("has no effect", where="data.order", got=f"data.format={self.format}", wanted="documents")


class Corpus:
    """The texts that `DataSettings` name. Who reads a run's data asks here: tokenizer, training, reports, samples.

    Each pass over the records (`records`, `texts`) applies the cleaning rules anew.
    """

    def __init__(self, settings: DataSettings, show: Show | None = None) -> None:
        """show: is told how far a pass is."""
        self.settings, self._show = settings, show

    @cached_property
    def files(self) -> list[Path]:
        """Raises UserError if there is none."""
        if not self.settings.train:
            raise UserError(
                "no data", where="data.train", next_step="Give data.train=FILE, or see `penjing data list`."
            )
        return list_files([Path(name) for name in self.settings.train])

    @cached_property
    def contents(self) -> dict[str, list[Any]]:
        """Size and SHA-256 of each file, by its name."""
        return {printable(path): [path.stat().st_size, sha256_file(path)] for path in self.files}

    @cached_property
    def pipeline(self) -> Pipeline:
        """The cleaning rules. Raises UserError for a wrong one."""
        return Pipeline.load(self.settings.clean)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the records and their split: the files' contents and the settings, but not the files' names."""
        settings = self.settings
        return {
            "source": sha256_text(json.dumps(list(self.contents.values()))),
            "kind": settings.format,
            "val_fraction": settings.val_fraction,
            **{name: value for name, value in self._choices.items() if value != _UNCHANGED[name]},
        }

    @property
    def _choices(self) -> dict[str, Any]:
        """Settings that change the records."""
        thinking, columns = self.settings.thinking, list(self.settings.columns)
        return {"thinking": thinking, "clean": self.pipeline.fingerprint(), "columns": columns}

    def ready_tokens(self, meta_file: str) -> Path | None:
        """The folder of data.train, if it holds tokens made before. Raises UserError if they were made otherwise.

        meta_file: in the folders of both splits.
        """
        paths = self.settings.train
        if len(paths) != 1 or not (Path(paths[0]) / "train" / meta_file).is_file():
            return None
        folder = Path(paths[0])
        made_from = read_json(folder / "done.json")["made_from"] if (folder / "done.json").is_file() else None
        for name, value in self._choices.items():
            made = made_from.get(name, _UNCHANGED[name]) if made_from else value
            if made != value:
                raise UserError(
                    "these tokens were made with another setting",
                    where=f"data.{name}",
                    got=value,
                    wanted=f"{made}, as in {folder / 'done.json'}, or the text itself as data.train",
                )
        return folder

    def counts(self, listed: Path | None = None) -> BadRecords:
        """For one pass: as many broken records as the settings allow. listed: the file that names them."""
        return BadRecords(self.settings.max_bad_fraction, listed)

    def records(self, counts: BadRecords | None = None) -> Iterator[Any]:
        """The records of `data.format`, in the order of the files.

        counts: of broken, left-out and changed records; None: another pass counts them, and nothing is an error.
        """
        counts = counts or BadRecords(max_bad_fraction=1.0)
        clean = self.pipeline.make(counts.changed) if self.settings.clean else None
        columns = parse_columns(self.settings.columns)
        records = READERS[self.settings.format](self.files, bad_records=counts, clean=clean, columns=columns)
        return watch(records, self.files, self._show) if self._show else records

    def texts(self, counts: BadRecords | None = None, *, held_out: bool | None = None) -> Iterator[str]:
        """The text of each document, or the contents of each conversation.

        held_out: only texts that are held out, or only those that are not.
        """
        records = self.records(counts)
        if held_out is not None:
            below = held_out_below(map(split_key, self.records()), self.settings.val_fraction)
            records = (record for record in records if is_held_out(split_key(record), below) == held_out)
        return ("\n".join(texts_of(record)) for record in records)


# Their values without effect on the records
_UNCHANGED: dict[str, Any] = {"thinking": "as_given", "clean": [], "columns": []}


# --- the split -------------------------------------------------------------------------------------------------------

SPLIT_SEED = 0  # fixed, so that every run holds out the same texts


def split_key(record: Record) -> str:
    """The text whose hash decides the split. Of a preference: the question, so that all its answers stay together."""
    if isinstance(record, Document):
        return record.text
    messages: Sequence[Message]
    if isinstance(record, Chat):
        messages = record.messages
    else:
        messages = record.chats[0].messages
        last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=0)
        messages = messages[: last_user + 1]
    return "\n".join(f"{message.role}: {message.content}" for message in messages)


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
