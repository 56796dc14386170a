"""penjing data look: what files hold, some records as the trainer sees them, and what cannot be read."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penjing.base.errors import UserError
from penjing.base.files import printable
from penjing.base.formatting import listing
from penjing.base.markup import escape_markup, print_table
from penjing.data import dataset_stats as survey
from penjing.data.formats.fields import parse_columns
from penjing.data.look import Group, Span, look
from penjing.data.tokenizer.train import byte_tokenizer
from penjing.workflows.tokenizers import load_tokenizer

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
        print(json.dumps({"groups": [group.as_json() for group in groups], "not_understood": unread}))
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
        number = f" ({problem.records:,} records, the first)" if problem.records > 1 else ""
        _note(console, f"{problem.kind}{number}", f"{problem.file}:{problem.line}: {problem.reason}")
    for what, (count, first) in islice(group.problems.ignored.items(), survey.NUM_FIELDS_NAMED):
        _note(console, "not learned", f"{what} ({count:,} records, the first {first})")
    has_colours = console.is_terminal and not console.no_color
    legend = Text.assemble(("learned", "green"), ", ", ("not learned", "dim"), ", ", ("special token", _SPECIAL))
    marked = Text(f"{_MARKS[0]}learned{_MARKS[1]}, not learned; <|special tokens|>")
    if group.examples:
        console.print(Text.assemble("\nas the trainer sees them: ", legend if has_colours else marked))
    for example in group.examples:
        cut = ", long texts cut" if example.cut else ""
        console.print(Text(f"--- {_printable(example.file)}:{example.line}{cut}", style="bold"), soft_wrap=True)
        if example.problem:
            _note(console, "not shown", example.problem)
        for row in example.rows:
            if len(example.rows) > 1:
                console.print(Text(f"[{row.name}]", style="bold"))
            shown = _shown(row.spans)
            console.print(_coloured(shown) if has_colours else Text(_marked(shown)), soft_wrap=True)


def _note(console: Console, label: str, text: str) -> None:
    console.print(escape_markup(label, _printable(text), indent=""), soft_wrap=True)


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
    stats, problems = group.stats, group.problems
    fields = [
        f"{name} as {role}" + (f" ({count:,})" if count < problems.good else "")
        for (name, role), count in problems.roles.most_common(survey.NUM_FIELDS_NAMED)
    ]
    rows = [("fields", ", ".join(fields))] if fields else []
    rows += [("changed", f"{count:,}: {what}") for what, count in problems.changed.most_common()]
    how = "from a sample" if is_measured else "no tokenizer given"
    rows += [*stats.rows(), ("tokens", f"about {group.tokens:,} ({how})")]
    print_table(console, (), [(Text(name, style="dim"), _printable(value)) for name, value in rows])
    names = [{"p50": "median"}.get(name, f"{name[1:]} %" if name[0] == "p" else name) for name in survey.QUANTILES]
    lengths = [
        (name, *(f"{value:,}" for value in survey.quantiles(values).values()))
        for name, values in stats.lengths.items()
        if any(values)
    ]
    if lengths:
        print_table(console, ("length", *(f"{name}>" for name in names)), lengths)
    if group.stopped:
        console.print("the first GiB of text; the rest is not read", highlight=False)
    for warning in stats.warnings:
        _note(console, "warning", warning)


def _printable(text: str) -> str:
    """Printable text: file names and quoted content may hold invalid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
