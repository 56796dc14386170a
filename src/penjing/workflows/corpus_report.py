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
    """Print statistics of each kind of data in the files: texts, conversations, preferences, prompts."""
    files_by_kind: dict[Kind, list[Path]] = {}
    for path in records.list_files(files):
        files_by_kind.setdefault(survey.file_kind(path), []).append(path)
    for number, kind in enumerate(sorted(files_by_kind)):
        if number:
            console.print()
        names = [printable(path) for path in files_by_kind[kind]]
        console.print(Text(f"{kind}: {listing(names)}", style="bold"), soft_wrap=True)
        _print_survey(survey.compute_stats(files_by_kind[kind], kind), console)


def _print_survey(stats: survey.Stats, console: Console) -> None:
    """Print a table of counts, a table of lengths with a column per quantile, and the warnings."""
    print_table(console, (), [(Text(name, style="dim"), _printable(value)) for name, value in _counts(stats)])
    lengths = [(name, q.quantiles()) for name, q in stats.lengths.items() if q.largest]
    if lengths:
        names = [{"p50": "median"}.get(q, f"{q[1:]} %" if q[0] == "p" else q) for q in survey.QUANTILES]
        rows = [(name, *(f"{quantiles[q]:,}" for q in survey.QUANTILES)) for name, quantiles in lengths]
        print_table(console, ("length", *(f"{name}>" for name in names)), rows)
    if not stats.lengths_exact:
        console.print(f"all but min and max: of a random sample of {survey.RESERVOIR_SIZE:,}", highlight=False)
    for warning in stats.warnings:
        console.print(escape_markup("warning", _printable(warning), indent=""))


def _counts(stats: survey.Stats) -> Iterator[tuple[str, str]]:
    match stats:
        case survey.DocumentStats():
            yield "documents", f"{stats.num_records:,}"
        case survey.ChatStats():
            yield "conversations", f"{stats.num_records:,}"
        case survey.PreferenceStats():
            yield "pairs", f"{stats.num_pairs:,}"
            yield "single rated answers", f"{stats.num_records - stats.num_pairs:,}"
        case survey.PromptStats():
            yield "prompts", f"{stats.num_records:,}"
    yield "broken records", f"{stats.bad_records.bad:,}"
    for reason, number in stats.bad_records.reasons.most_common():
        yield "left out", f"{number:,}: {reason}"
    yield "exact duplicates", f"{stats.num_duplicates:,}"
    match stats:
        case survey.DocumentStats():
            yield from _text_counts(stats)
        case survey.ChatStats():
            yield "messages by role", _counts_text(stats.roles.most_common())
            yield "size of answers", units.megabytes(stats.num_answer_bytes)
            yield "tool calls", f"{stats.num_tool_calls:,}"
            yield "with reasoning", f"{stats.num_with_reasoning:,}"
        case survey.PreferenceStats() if stats.num_pairs:
            yield "chosen is longer", f"{_percent(stats.num_chosen_longer / stats.num_pairs)} of pairs"
        case survey.PromptStats() if stats.fields:
            yield "other fields", _counts_text(stats.fields.most_common(survey.NUM_FIELDS_NAMED))
    if isinstance(stats, survey.ChatStats | survey.PromptStats):
        yield "with a system message", f"{stats.num_with_system:,}"
        yield "with tools", f"{stats.num_with_tools:,}"


def _text_counts(stats: survey.DocumentStats) -> Iterator[tuple[str, str]]:
    yield "size", units.megabytes(stats.num_bytes)
    yield "characters", f"{stats.num_characters:,}, {stats.num_distinct_characters:,} distinct"
    yield "scripts", ", ".join(f"{name} {_percent(share)}" for name, share in stats.scripts.items())
    common = stats.common_characters
    yield "most frequent", " ".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in common)
    for num_characters, source, line in sorted(stats.longest, reverse=True):
        yield "long line", f"{num_characters:,} characters, {source}:{line}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _counts_text(counts: list[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts)


def _printable(text: str) -> str:
    """Printable text: file names and quoted content may hold invalid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def print_tokens(path: Path, text: str, console: Console) -> None:
    """Print a text split into tokens, with their ids, and the mean characters per token."""
    if not (path / "tokenizer.json").is_file():
        from penjing.track.run_dir import RunDir, stage_folder  # imports torch

        path = RunDir(stage_folder(path)).tokenizer
    tokenizer = Tokenizer.load(path)
    if text != _printable(text):
        raise UserError("not valid UTF-8", where="the text", got=_printable(text)[:40])
    ids = tokenizer.encode(text)
    console.print(" ".join(f"{tokenizer.token(index)!r}:{index}" for index in ids), highlight=False, markup=False)
    console.print(f"{len(ids)} tokens, {len(text) / max(1, len(ids)):.2f} characters each", highlight=False)
