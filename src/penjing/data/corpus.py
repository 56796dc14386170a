"""The texts of a run: from its settings to files, records, the texts that are held out, and a fingerprint."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from penjing.base.config import Fraction, NonNegativeFloat, NonNegativeInt, Settings
from penjing.base.errors import UserError
from penjing.base.files import printable, read_json, sha256_text
from penjing.base.seeds import fraction
from penjing.data.clean.pipeline import Pipeline
from penjing.data.clean.rule import Record, texts_of
from penjing.data.formats import READERS, BadRecords, Chat, Document, Kind, list_files
from penjing.data.formats.fields import parse_columns
from penjing.data.formats.files import content_of
from penjing.data.formats.read import refuse_placeholders
from penjing.data.progress import Show, watch


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings, section="data"):
    """Training data."""

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
    # Sources in given shares of the training tokens, one for each entry of `train`; a source repeats if its share needs
    # it. Empty: every text once an epoch. Of texts and conversations.
    weights: tuple[float, ...] = ()
    # Of each source, or of all: epochs after which it is drawn no more, and the shares of the others grow. 0: no limit.
    max_epochs: tuple[NonNegativeFloat, ...] = ()
    # Other shares for the last `final_fraction` of the run: the best data last. Empty: no change.
    final_weights: tuple[float, ...] = ()
    final_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2  # of the run, at its end, with `final_weights`
    # Files that are held out, beside `train`; empty: `val_fraction` of `train`; none: nothing is, and there is no
    # held-out loss.
    validation: tuple[str, ...] = ()
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
        for name in ("weights", "final_weights"):
            self._check_weights(name)
        if self.max_epochs and len(self.max_epochs) not in (1, len(self.weights)):
            wanted = f"1 or {len(self.weights)} numbers"
            raise self.error("max_epochs", "not one for each of data.weights", wanted=wanted)
        if self.max_epochs and not self.weights:
            raise self.error("max_epochs", "has no effect without data.weights", wanted="a weight for each source")

    def _check_weights(self, name: str) -> None:
        weights = getattr(self, name)
        if not weights:
            return
        if self.format not in ("documents", "chats"):
            raise self.error(name, f"has no effect with data.format={self.format}", wanted="documents or chats")
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise self.error(name, "out of range", wanted="numbers >= 0, one of them above")
        if name == "final_weights" and len(weights) != len(self.weights):
            raise self.error(name, "not one for each of data.weights", wanted=f"{len(self.weights)} numbers in both")

    @property
    def holds_out(self) -> bool:
        return self.validation != ("none",)


class Corpus:
    """The texts that `DataSettings` name. Who reads a run's data asks here: tokenizer, training, reports, samples.

    Each pass over the records (`records`, `texts`) applies the cleaning rules anew.
    """

    def __init__(self, settings: DataSettings, show: Show | None = None) -> None:
        """show: is told how far a pass is."""
        self.settings, self._show = settings, show

    @cached_property
    def sources(self) -> list[tuple[str, list[Path]]]:
        """The entries of `data.train` with their files, without those of `data.validation`."""
        if not self.settings.train:
            hint = "Give data.train=FILE, or see `penjing data list`."
            raise UserError("no data", where="data.train", next_step=hint)
        held_out = {path.resolve() for path in self.validation_files}
        sources = [
            (name, [path for path in list_files([Path(name)]) if path.resolve() not in held_out])
            for name in self.settings.train
        ]
        empty = [name for name, files in sources if not files]
        if len(empty) == len(sources) or (empty and self.settings.weights):
            what = f"holds all files of {', '.join(empty)}, so none is left to learn from"
            raise self.settings.error("validation", what, wanted="other files")
        paths = [path for _, files in sources for path in files]
        if len(set(paths)) < len(paths):
            twice, _ = Counter(paths).most_common(1)[0]
            hint = "To learn more of it, give it a larger share by data.weights."
            raise UserError("a file is named twice", where="data.train", got=printable(twice), next_step=hint)
        if self.settings.weights and len(self.settings.weights) != len(sources):
            wanted = f"{len(sources)}, one for each of {', '.join(name for name, _ in sources)}"
            raise self.settings.error("weights", "not one for each source", wanted=wanted)
        return sources

    @property
    def files(self) -> list[Path]:
        return [path for _, files in self.sources for path in files]

    @cached_property
    def validation_sources(self) -> list[tuple[str, list[Path]]]:
        names = self.settings.validation if self.settings.holds_out else ()
        return [(name, list_files([Path(name)])) for name in names]

    @property
    def validation_files(self) -> list[Path]:
        return [path for _, files in self.validation_sources for path in files]

    @cached_property
    def contents(self) -> dict[str, list[Any]]:
        """Size and SHA-256 of each file to learn from, by its name."""
        return {printable(path): content_of(path) for path in self.files}

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline.load(self.settings.clean)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file by the name in its records, in the order in which they are tokenized."""
        held_out = {str(path): content_of(path)[1] for path in self.validation_files}
        return {**held_out, **{str(path): self.contents[printable(path)][1] for path in self.files}}

    @property
    def about(self) -> dict[str, Any]:
        """For the tokens' folders: the files with their hashes, and the sources of both splits."""
        halves = {"train": self.sources, "validation": self.validation_sources or self.sources}
        sources = {half: [(name, list(map(str, files))) for name, files in sources] for half, sources in halves.items()}
        return {"hashes": self.hashes, "sources": sources}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the records and their split: the files' contents and the settings, but not the files' names."""
        settings = self.settings
        validation = [self.hashes[str(path)] for path in self.validation_files] or list(settings.validation)
        grouping = [len(files) for _, files in self.sources]
        now = {"validation": validation, "sources": grouping if len(grouping) > 1 else []}
        return {
            "source": sha256_text(json.dumps(list(self.contents.values()))),
            "kind": settings.format,
            "val_fraction": settings.val_fraction,
            **{name: value for name, value in self._choices.items() if value != _UNCHANGED[name]},
            **{name: value for name, value in now.items() if value},
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
        if self.settings.validation and self.settings.holds_out:
            raise self.settings.error("validation", "these tokens have a split of their own", wanted="it left out")
        for name, value in self._choices.items():
            made = made_from.get(name, _UNCHANGED[name]) if made_from else value
            if made != value:
                what, wanted = "these tokens were made with another setting", f"{made}, as in {folder / 'done.json'}"
                hint = "Or give the text itself as data.train."
                raise UserError(what, where=f"data.{name}", got=value, wanted=wanted, next_step=hint)
        return folder

    def counts(self, listed: Path | None = None) -> BadRecords:
        """For one pass: as many broken records as the settings allow. listed: the file that names them."""
        return BadRecords(self.settings.max_bad_fraction, listed)

    def records(self, counts: BadRecords | None = None, files: Sequence[Path] | None = None) -> Iterator[Any]:
        """The records of `data.format`, in the order of the files.

        counts: of broken, left-out and changed records; None: another pass counts them, and nothing is an error.
        files: held-out files of their own, read as they are; None: those to learn from, cleaned.
        """
        counts = counts or BadRecords(max_bad_fraction=1.0)
        clean = self.pipeline.make(counts.changed) if self.settings.clean and files is None else None
        columns = parse_columns(self.settings.columns)
        for path in self.files if self.settings.format == "chats" and not files else ():
            refuse_placeholders(path, columns)
        files = files or self.files
        records = READERS[self.settings.format](files, bad_records=counts, clean=clean, columns=columns)
        return watch(records, files, self._show) if self._show else records

    @cached_property
    def split(self) -> Split:
        """How texts are held out. Of documents it reads some, of few all."""
        settings = self.settings
        if settings.validation:
            return Split(share=settings.val_fraction, below=0.5, may_be_empty=not settings.holds_out)
        if settings.format == "documents":
            return split_documents(self.records(), settings.val_fraction)
        return Split(share=settings.val_fraction)

    def placed(self, counts: BadRecords | None = None) -> Iterator[Placed]:
        """Every record with its place: held out are those below `split.below`. Those of data.validation come first."""
        if not self.settings.validation:
            return self.split.placed(self.records(counts))
        held_out = self.records(self.counts(), self.validation_files) if self.validation_files else iter(())
        learned = ((record, LEARNED) for record in self.records(counts))
        return chain(((record, HELD_OUT) for record in held_out), learned)

    def texts(self, counts: BadRecords | None = None, *, held_out: bool | None = None) -> Iterator[str]:
        """The text of each document, or those of each conversation.

        held_out: only texts that are held out, or only those that are not.
        """
        if held_out is None:
            return map(_text_of, self.records(counts))
        below = self.split.below
        if below is None:
            below = threshold((place for _, place in self.placed()), self.split.share)
        return (_text_of(record) for record, place in self.placed(counts) if (place < below) == held_out)

    def prompts(self, most: int) -> tuple[str, ...]:
        """First questions of conversations, or first words of documents: of those held out, if there are enough."""
        placed = sorted(islice(self.placed(), SEARCHED_RECORDS), key=lambda pair: pair[1])
        found = dict.fromkeys(_prompt(record) for record, _ in placed)
        return tuple(prompt for prompt in found if 0 < len(prompt) <= PROMPT_CHARACTERS)[:most]


def _text_of(record: Record) -> str:
    return "\n".join(texts_of(record))


SEARCHED_RECORDS, PROMPT_CHARACTERS, OPENING_CHARACTERS = 1000, 300, 40


def _prompt(record: Record) -> str:
    if isinstance(record, Document):
        line, _, _ = record.text.strip().partition("\n")
        start = line[:OPENING_CHARACTERS]
        return line if start == line else start.rpartition(" ")[0] or start
    messages = (record if isinstance(record, Chat) else record.chats[0]).messages
    return next((message.content.strip() for message in messages if message.role == "user"), "")


# Their values without effect on the records
_UNCHANGED: dict[str, Any] = {"thinking": "as_given", "clean": [], "columns": []}


# --- the split -------------------------------------------------------------------------------------------------------

SPLIT_SEED = 0  # fixed, so that every run holds out the same texts


def split_key(record: Record) -> str:
    """The text whose hash decides the split. Of a preference: the question, so that all its answers stay together."""
    if isinstance(record, Document):
        return record.text
    messages = (record if isinstance(record, Chat) else record.chats[0]).messages
    if not isinstance(record, Chat):
        last_user = max((index for index, message in enumerate(messages) if message.role == "user"), default=0)
        messages = messages[: last_user + 1]
    return "\n".join(f"{message.role}: {message.content}" for message in messages)


def place_of(text: str) -> float:
    """A number in [0, 1): a pure function of the text, so that copies get the same split and none ever moves."""
    return fraction(SPLIT_SEED, "held out", text)


Placed = tuple[Any, float]  # a record, and its place: held out are those below a threshold
# Places that no hash gives: of files given as such, and of the two parts of a document whose end is held out.
HELD_OUT, LEARNED, END, BEGINNING = -1.0, 2.0, -0.5, 1.5
FAR = 3  # held out by hash is at most this times the share; else less is held out, or the end of a document
ENOUGH = 1000  # documents that show how large a part the hash holds out


@dataclass(frozen=True, kw_only=True)
class Split:
    """How texts are held out: those below a threshold; of hardly any text the end of one document."""

    share: float
    below: float | None = None  # None: it depends on which records fit (see `threshold`)
    may_be_empty: bool = False  # whether nothing need be held out
    cut: float | None = None  # the hash of the document whose last `cut_characters` are held out
    cut_characters: int = 0
    cut_where: str = ""  # file and line

    def placed(self, records: Iterable[Record]) -> Iterator[Placed]:
        """The records with their places, or both parts of the one that is cut."""
        for record in records:
            place = place_of(split_key(record))
            if place != self.cut or not isinstance(record, Document):
                yield record, place
                continue
            text = record.text
            middle = len(text) - self.cut_characters
            middle = text.rfind("\n", middle - self.cut_characters // 4, middle) + 1 or middle  # if near, after a line
            if middle:
                yield replace(record, text=text[:middle]), BEGINNING
            yield replace(record, text=text[middle:]), END

    @property
    def note(self) -> str:
        """A line for the user; empty if whole texts are held out."""
        if self.cut is None:
            return ""
        return (
            f"too few documents to hold out a whole one: about the last {self.cut_characters:,} characters of "
            f"{self.cut_where} are held out (data.validation=FILE holds out texts of your own)"
        )


def split_documents(documents: Iterable[Document], share: float) -> Split:
    """Hold out by hash those below `share`; if that is nothing, all, or far more characters than `share`, then the
    first ones in the order of their hashes; if one is too long for that, its end.

    Stops reading as soon as that is not needed.
    """
    sizes: dict[float, int] = {}  # characters by hash, of those below `share` and of the lowest one
    copies: Counter[float] = Counter()
    lowest, highest, total, where = 2.0, -1.0, 0, ""
    for number, document in enumerate(documents, start=1):
        value, size = place_of(document.text), len(document.text)
        total += size
        highest = max(highest, value)
        if value < share or value <= lowest:
            if value < lowest and lowest >= share:
                sizes.pop(lowest, None)
            if value < lowest:
                lowest, where = value, f"{document.source}:{document.line}"
            sizes[value] = sizes.get(value, 0) + size
            copies[value] += 1
        if number >= ENOUGH and lowest < share <= highest and sum(sizes.values()) <= FAR * share * total:
            break
    by_share = lowest < share <= highest
    if not sizes or (by_share and sum(sizes.values()) <= FAR * share * total):
        return Split(share=share, below=share)
    below, held_out = 0.0, 0
    for value in sorted(sizes) if by_share else [lowest]:
        held_out += sizes[value]
        if held_out > FAR * share * total:
            break
        below = math.nextafter(value, 1.0)
    if 0 < below <= highest:
        return Split(share=share, below=below)
    length = sizes[lowest] // copies[lowest]
    characters = max(1, min(length - 1, round(share * total / copies[lowest])))
    return Split(share=share, below=0.0, cut=lowest, cut_characters=characters, cut_where=where)


def threshold(places: Iterable[float], share: float) -> float:
    """The place below which texts are held out: `share`, if that leaves texts in both splits.

    A handful of texts may all fall on one side. Then only the text with the lowest place is held out, if at least two
    texts differ. Stops reading as soon as the result is known.
    """
    lowest, highest = 2.0, -1.0
    for place in places:
        lowest, highest = min(lowest, place), max(highest, place)
        if lowest < share <= highest:
            return share
    return math.nextafter(lowest, 1.0) if lowest < highest else share
