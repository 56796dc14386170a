"""penjing data look: what files hold, some records as the trainer sees them, and what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import printable
from penjing.base.formatting import listing
from penjing.base.markup import escape_markup, print_table
from penjing.data import dataset_stats as survey
from penjing.data.formats.fields import parse_columns
from penjing.data.look import Example, Group, Span, look
from penjing.data.tokenizer.train import byte_tokenizer
from penjing.workflows.show_tokens import load_tokenizer

_MARKS = ("\u27e6", "\u27e7")  # around what is learned, where there are no colours
_LONG, _HEAD, _TAIL = 700, 450, 150  # characters of a span: longer ones lose their middle
_MOST = 4000  # characters of a row
_SPECIAL = "bold magenta"


def data_look(
    paths: list[Path], console: Console, *, columns: Sequence[str], tokenizer: Path | None, as_json: bool
) -> None:
    """Print what the files hold, as text or as one JSON object. Raises UserError if no file is understood."""
    used = load_tokenizer(tokenizer) if tokenizer else byte_tokenizer()
    groups: list[Group] = []
    errors: list[UserError] = []
    for found in look(paths, used, parse_columns(columns), counts_tokens=tokenizer is not None):
        if isinstance(found, UserError):
            errors.append(found)
            continue
        groups.append(found)
        if not as_json:
            if len(groups) > 1:
                console.print()
            _print_group(found, console, is_measured=tokenizer is not None)
    if as_json:
        unread = [{"file": str(error.where), "reason": error.line()} for error in errors]
        print(
            json.dumps({"groups": [group.as_json() for group in groups], "not_understood": unread}, ensure_ascii=True)
        )
    if not groups:
        first, *others = errors
        if not others:
            raise first
        raise UserError(f"no file is understood: {first.line().rstrip('.')}; and {len(others):,} more")
    for error in errors if not as_json else ():
        console.print(escape_markup("not understood", _printable(error.line()), indent="", style="red"), soft_wrap=True)


def _print_group(group: Group, console: Console, *, is_measured: bool) -> None:
    names = [printable(path) for path in group.files]
    console.print(Text(f"{group.kind}: {listing(names)}", style="bold"), soft_wrap=True)
    _print_survey(group, console, is_measured=is_measured)
    for problem in group.problems.found.values():
        reason = f"{problem.file}:{problem.line}: {problem.reason}"
        number = f" ({problem.count:,} records, the first)" if problem.count > 1 else ""
        console.print(escape_markup(f"{problem.kind}{number}", _printable(reason), indent=""), soft_wrap=True)
    for index, (what, (count, first)) in enumerate(group.problems.ignored.items()):
        if index < survey.NUM_FIELDS_NAMED:
            text = f"{what} ({count:,} records, the first {first})"
            console.print(escape_markup("not learned", _printable(text), indent=""), soft_wrap=True)
    has_colours = console.is_terminal and not console.no_color
    legend = Text.assemble(("learned", "green"), ", ", ("not learned", "dim"), ", ", ("special token", _SPECIAL))
    marked = Text(f"{_MARKS[0]}learned{_MARKS[1]}, not learned; <|special tokens|>")
    if group.examples:
        console.print(Text.assemble("\nas the trainer sees them: ", legend if has_colours else marked))
    for example in group.examples:
        _print_example(example, console, has_colours=has_colours)


def _print_example(example: Example, console: Console, *, has_colours: bool) -> None:
    cut = ", long texts cut" if example.cut else ""
    console.print(Text(f"--- {_printable(example.source)}:{example.line}{cut}", style="bold"), soft_wrap=True)
    if example.problem:
        console.print(escape_markup("not shown", example.problem, indent=""))
    for name, spans in example.rows:
        if len(example.rows) > 1:
            console.print(Text(f"[{name}]", style="bold"))
        shown = _shown(spans)
        console.print(_coloured(shown) if has_colours else Text(_marked(shown)), soft_wrap=True)


def _shown(spans: Sequence[Span]) -> list[Span]:
    """The spans of the terminal: long ones are shortened, and those after many characters left out."""
    shown: list[Span] = []
    num_characters = 0
    for number, span in enumerate(spans):
        if num_characters > _MOST:
            return [*shown, Span(f"\n... ({len(spans) - number:,} more spans)", learned=False)]
        shown.append(replace(span, text=_shortened(span.text)))
        num_characters += len(shown[-1].text)
    return shown


def _coloured(spans: Sequence[Span]) -> Text:
    text = Text()
    for span in spans:
        style = "green" if span.learned else "dim"
        text.append(span.text, f"{_SPECIAL}{'' if span.learned else ' dim'}" if span.special else style)
    return text


def _marked(spans: Sequence[Span]) -> str:
    """The spans as plain text, with marks around what is learned."""
    text, was_learned = "", False
    for span in spans:
        text += _MARKS[was_learned] if span.learned != was_learned else ""
        was_learned = span.learned
        text += span.text
    return text + (_MARKS[1] if was_learned else "")


def _shortened(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_HEAD]} ... ({len(text) - _HEAD - _TAIL:,} characters) ... {text[-_TAIL:]}"


def _print_survey(group: Group, console: Console, *, is_measured: bool) -> None:
    """Print a table of counts, a table of lengths with a column per quantile, and the warnings."""
    stats = group.stats
    counts = [*_readings(group), *_counts(stats), ("tokens", _tokens(group, is_measured=is_measured))]
    print_table(console, (), [(Text(name, style="dim"), _printable(value)) for name, value in counts])
    lengths = [(name, q.quantiles()) for name, q in stats.lengths.items() if q.largest]
    if lengths:
        names = [{"p50": "median"}.get(q, f"{q[1:]} %" if q[0] == "p" else q) for q in survey.QUANTILES]
        rows = [(name, *(f"{quantiles[q]:,}" for q in survey.QUANTILES)) for name, quantiles in lengths]
        print_table(console, ("length", *(f"{name}>" for name in names)), rows)
    if not stats.lengths_exact:
        console.print(f"all but min and max: of a random sample of {survey.RESERVOIR_SIZE:,}", highlight=False)
    if group.stopped:
        console.print("the first GiB of text; the rest is not read", highlight=False)
    for warning in stats.warnings:
        console.print(escape_markup("warning", _printable(warning), indent=""))


def _readings(group: Group) -> Iterator[tuple[str, str]]:
    """What fields are read as, and what is changed."""
    records = group.problems.good
    fields = [
        f"{name} as {role}" + (f" ({count:,})" if count < records else "")
        for (name, role), count in group.problems.roles.most_common(survey.NUM_FIELDS_NAMED)
    ]
    if fields:
        yield "fields", ", ".join(fields)
    for what, count in group.problems.changed.most_common():
        yield "changed", f"{count:,}: {what}"


def _tokens(group: Group, *, is_measured: bool) -> str:
    how = "from a sample" if is_measured else "no tokenizer given"
    return f"about {group.tokens:,} ({how})"


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
    scripts = [f"{name} {_percent(share)}" for name, share in stats.scripts.items() if share >= 0.0005]
    yield "languages, by script", ", ".join(scripts) or "none"
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
