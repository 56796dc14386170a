"""penjing data report and tokenizer show: inspect a corpus, and how a tokenizer splits a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import printable
from penjing.base.formatting import listing
from penjing.base.markup import escape_markup, print_table
from penjing.data import dataset_stats as survey
from penjing.data import formats as records
from penjing.data.formats import Kind
from penjing.data.tokenizer.tokenizer import Tokenizer


def corpus_report(files: list[Path], console: Console) -> None:
    """Print a survey of each kind of data among the files: texts, conversations, preferences, prompts."""
    of_kind: dict[Kind, list[Path]] = {}
    for path in records.list_files(files):
        of_kind.setdefault(survey.file_kind(path), []).append(path)
    for number, kind in enumerate(sorted(of_kind)):
        if number:
            console.print()
        names = [printable(path) for path in of_kind[kind]]
        console.print(Text(f"{kind}: {listing(names)}", style="bold"), soft_wrap=True)
        _print_survey(survey.compute_stats(of_kind[kind], kind), console)


def _print_survey(counted: survey.Stats, console: Console) -> None:
    """A table of counts, a table of lengths with a column for each quantile, then the warnings."""
    print_table(console, (), [(Text(name, style="dim"), _plain(value)) for name, value in _counts(counted)])
    lengths = [(name, each.quantiles()) for name, each in counted.lengths.items() if each.largest]
    if lengths:
        names = [{"p50": "median"}.get(each, f"{each[1:]} %" if each[0] == "p" else each) for each in survey.QUANTILES]
        rows = [(name, *(f"{quantiles[each]:,}" for each in survey.QUANTILES)) for name, quantiles in lengths]
        print_table(console, ("length", *(f"{name}>" for name in names)), rows)
    if not counted.lengths_exact:
        console.print(f"all but min and max: of a random sample of {survey.RESERVOIR_SIZE:,}", highlight=False)
    for warning in counted.warnings:
        console.print(escape_markup("warning", _plain(warning), indent=""))


def _counts(counted: survey.Stats) -> Iterator[tuple[str, str]]:
    match counted:
        case survey.DocumentStats():
            yield "documents", f"{counted.num_records:,}"
        case survey.ChatStats():
            yield "conversations", f"{counted.num_records:,}"
        case survey.PreferenceStats():
            yield "pairs", f"{counted.num_pairs:,}"
            yield "single rated answers", f"{counted.num_records - counted.num_pairs:,}"
        case survey.PromptStats():
            yield "prompts", f"{counted.num_records:,}"
    yield "broken records", f"{counted.bad_records.bad:,}"
    for reason, number in counted.bad_records.reasons.most_common():
        yield "left out", f"{number:,}: {reason}"
    yield "exact duplicates", f"{counted.num_duplicates:,}"
    match counted:
        case survey.DocumentStats():
            yield from _text_counts(counted)
        case survey.ChatStats():
            yield "messages by role", _listed(counted.roles.most_common())
            yield "size of answers", units.megabytes(counted.num_answer_bytes)
            yield "tool calls", f"{counted.num_tool_calls:,}"
            yield "with reasoning", f"{counted.num_with_reasoning:,}"
        case survey.PreferenceStats() if counted.num_pairs:
            yield "chosen is longer", f"{_percent(counted.num_chosen_longer / counted.num_pairs)} of pairs"
        case survey.PromptStats() if counted.fields:
            yield "other fields", _listed(counted.fields.most_common(survey.NUM_FIELDS_NAMED))
    if isinstance(counted, survey.ChatStats | survey.PromptStats):
        yield "with a system message", f"{counted.num_with_system:,}"
        yield "with tools", f"{counted.num_with_tools:,}"


def _text_counts(counted: survey.DocumentStats) -> Iterator[tuple[str, str]]:
    yield "size", units.megabytes(counted.num_bytes)
    yield "characters", f"{counted.num_characters:,}, {counted.num_distinct_characters:,} distinct"
    yield "scripts", ", ".join(f"{name} {_percent(share)}" for name, share in counted.scripts.items())
    common = counted.common_characters
    yield "most frequent", " ".join(each if each.isprintable() else f"U+{ord(each):04X}" for each in common)
    for num_characters, source, line in sorted(counted.longest, reverse=True):
        yield "long line", f"{num_characters:,} characters, {source}:{line}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _listed(counts: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts)


def _plain(text: str) -> str:
    """Text that can be printed: what is quoted from a file, or its name, may hold half a character."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def print_tokens(path: Path, text: str, console: Console) -> None:
    """Print a text split into tokens, with their ids and how many characters one token holds."""
    if not (path / "tokenizer.json").is_file():
        from penjing.train.run_dir import RunDir, stage_folder  # imports torch

        path = RunDir(stage_folder(path)).tokenizer
    tokenizer = Tokenizer.load(path)
    if text != _plain(text):
        raise UserError("not valid UTF-8", where="the text", got=_plain(text)[:40])
    ids = tokenizer.encode(text)
    console.print(" ".join(f"{tokenizer.token(index)!r}:{index}" for index in ids), highlight=False, markup=False)
    console.print(f"{len(ids)} tokens, {len(text) / max(1, len(ids)):.2f} characters each", highlight=False)
