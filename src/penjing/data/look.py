"""A first look at data: what was understood, some records as the trainer sees them, and what could not be read."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.clean.rule import map_texts, place_of, texts_of
from penjing.data.dataset_stats import STATS, Stats, quantiles
from penjing.data.formats import READERS, Document, Kind, PreferenceRecord, UncheckedRecords, list_files, sniff
from penjing.data.formats.dispatch import first_record
from penjing.data.formats.fields import Columns
from penjing.data.formats.files import format_of
from penjing.data.formats.schema import TEXT_FORMATS
from penjing.data.preference_shards import encode
from penjing.data.tokenizer.tokenizer import Tokenizer

NUM_EXAMPLES = 3
EXAMPLE_CHARACTERS = 2000  # of one text of an example; the rest is not shown
SAMPLE_CHARACTERS = 1 << 20  # of the text that a given tokenizer encodes to estimate all tokens
MAX_TEXT_BYTES = 1 << 30  # of one group of files; the rest is not read
_MAX_REASONS = 100


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of an example in a row, as text. learned: whether the loss covers them. special: a control token."""

    text: str
    learned: bool
    special: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of an example; those of a preference are its prompt and its answers."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One record as the trainer sees it. problem: why it cannot be encoded."""

    file: str
    line: int
    problem: str
    cut: bool
    rows: tuple[Row, ...]


@dataclass(slots=True)
class Problem:
    """Records that cannot be read or are left out, for one reason. file, line: the first."""

    file: str
    line: int
    kind: str
    reason: str
    records: int = 1


class Problems(UncheckedRecords):
    """Counts as ever, and keeps the first place of each reason."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], Problem] = {}

    def _list(self, file: str, line: int, kind: str, reason: str) -> None:
        key = kind, reason.partition("; got ")[0]
        if key in self.found:
            self.found[key].records += 1
        elif len(self.found) < _MAX_REASONS:
            self.found[key] = Problem(file, line, kind, reason)


@dataclass(slots=True)
class Group:
    """Files of one kind whose records have the same fields. tokens: an estimate. stopped: not read to the end."""

    kind: Kind
    files: list[Path]
    stats: Stats
    problems: Problems
    examples: list[Example] = field(default_factory=list)
    tokens: int = 0
    stopped: bool = False

    def as_json(self) -> dict[str, Any]:
        stats, counts = self.stats, self.problems
        return {
            "kind": self.kind,
            "files": [str(path) for path in self.files],
            "fields": [{"field": name, "read_as": role, "records": num} for (name, role), num in counts.roles.items()],
            "records": {"good": counts.good, "bad": counts.bad, "left_out": counts.left_out},
            "changed": dict(counts.changed),
            "not_learned": [{"what": what, "records": num, "first": at} for what, (num, at) in counts.ignored.items()],
            "problems": [asdict(problem) for problem in counts.found.values()],
            "bytes": stats.num_bytes,
            "tokens_estimate": self.tokens,
            "scripts": {name: round(share, 4) for name, share in stats.scripts.items() if share},
            "exact_duplicates": stats.num_duplicates,
            "lengths": {name: quantiles(lengths) for name, lengths in stats.lengths.items()},
            "warnings": stats.warnings,
            "read_to_the_end": not (self.stopped or counts.unread),
            "examples": [asdict(example) for example in self.examples],
        }


def look(
    paths: Sequence[Path], tokenizer: Tokenizer, columns: Columns, *, counts_tokens: bool
) -> Iterator[Group | UserError]:
    """The groups of the files, each after one pass over it; then an error for each file that is not understood.

    counts_tokens: whether `tokenizer` is that of a model, so that its tokens are of interest.
    """
    groups: dict[tuple[Any, ...], list[Path]] = {}
    errors: list[UserError] = []
    for path in list_files(paths):
        try:
            kind = sniff(path, columns)
            names = () if format_of(path) in TEXT_FORMATS else tuple(sorted(map(str, first_record(path, columns))))
            groups.setdefault((kind, names), []).append(path)
        except UserError as error:
            errors.append(error)
    for (kind, _), files in sorted(groups.items()):
        yield _look_at(kind, files, tokenizer, columns, counts_tokens=counts_tokens)
    yield from errors


def _look_at(kind: Kind, files: list[Path], tokenizer: Tokenizer, columns: Columns, *, counts_tokens: bool) -> Group:
    problems = Problems()
    group = Group(kind, files, STATS[kind](problems), problems)
    num_characters, sampled_bytes, sampled_tokens = 0, 0, 0
    for record in READERS[kind](files, bad_records=problems, columns=columns):
        if len(group.examples) < NUM_EXAMPLES:
            group.examples.append(example(record, kind, tokenizer))
        group.stats.count([record])
        texts = [text[:SAMPLE_CHARACTERS] for text in texts_of(record)]
        num_characters += sum(map(len, texts))
        if counts_tokens and num_characters <= SAMPLE_CHARACTERS:
            sampled_tokens += sum(map(len, tokenizer.encode_many(texts)))
            sampled_bytes += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if num_characters > MAX_TEXT_BYTES // 4 and group.stats.num_bytes > MAX_TEXT_BYTES:
            group.stopped = True
            break
    stats = group.stats
    group.tokens = round(sampled_tokens * stats.num_bytes / sampled_bytes) if sampled_bytes else stats.estimated_tokens
    return group


def example(record: Any, kind: Kind, tokenizer: Tokenizer) -> Example:
    """A record as the trainer sees it; long texts are cut."""
    shown = map_texts(record, lambda text: text[:EXAMPLE_CHARACTERS])
    problem, rows = "", list[tuple[str, Sequence[int], Sequence[int]]]()  # name, ids and weights
    try:
        if isinstance(shown, Document):
            ids = [tokenizer.end_of_text, *tokenizer.encode(shown.text), tokenizer.end_of_text]
            rows.append(("document", ids, [0] + [1] * (len(ids) - 1)))
        elif isinstance(shown, PreferenceRecord):
            group = encode(shown, tokenizer)
            rows.append(("prompt", group.prompt, [0] * len(group.prompt)))
            for is_chosen, answer in zip(group.is_chosen, group.answers, strict=True):
                rows.append(("chosen" if is_chosen else "rejected", answer.ids, answer.weights))
        else:
            encoded = render(tokenizer, shown.messages, shown.tools, ask=kind == "prompts")
            weights = encoded.weights if kind == "chats" else [0] * len(encoded.ids)  # of a prompt nothing is learned
            rows.append((kind.removesuffix("s"), encoded.ids, weights))
    except UserError as error:  # two answers that differ only in what is not shown, or a template that refuses them
        problem = error.what
    spelled = tuple(Row(name, spans(tokenizer, ids, weights)) for name, ids, weights in rows)
    return Example(*place_of(record), problem, shown != record, spelled)


def spans(tokenizer: Tokenizer, ids: Sequence[int], weights: Sequence[int]) -> tuple[Span, ...]:
    """The ids as text, in spans of tokens that are learned, or are not; each control token is a span."""
    found = []
    tokens = ((index, bool(weight), index in tokenizer.added_ids) for index, weight in zip(ids, weights, strict=True))
    for (learned, special), group in groupby(tokens, key=lambda token: token[1:]):
        run = [index for index, *_ in group]
        texts = [tokenizer.token(index) for index in run] if special else [tokenizer.decode(run, hide=False)]
        found += [Span(text, learned, special) for text in texts]
    return tuple(found)
