"""The report in a few lines of terminal: the same facts as the page, through `rich`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penjing.report import text_format
from penjing.report.accuracy import AccuracyLine, Score, accuracy_lines
from penjing.report.load_run import ReportData, ReportedRun
from penjing.report.text_format import NONE, clip, kind_name, percent, signed_percent

LARGEST_TABLE = 40


def words(sentence: str, style: str = "") -> Text:
    """A sentence for the terminal: never markup, and no spaces before % (rich breaks lines at no-break spaces too)."""
    return Text(sentence.replace("\u00a0%", "%"), style=style)


def _score(score: Score | None) -> Text:
    if score is None:
        return Text(NONE)
    low, high = score.interval
    return words(f"{percent(score.fraction)} ({low * 100:.0f}–{high * 100:.0f})")


def accuracy_table(lines: list[AccuracyLine]) -> Table:
    """Right answers before and after training, beside guessing; totals stand in bold."""
    table = Table(title="Right answers (95 % interval)", title_justify="left", title_style="bold")
    for heading in ("kind", "language", "guessing", "before", "after", ""):
        figures = heading in ("guessing", "before", "after")
        table.add_column(heading, justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    for line in lines if len(lines) <= LARGEST_TABLE else [*lines[: LARGEST_TABLE - 1], lines[-1]]:
        kind, language = kind_name(line.kind), clip(text_format.language_name(line.language), 16)
        cells = words(percent(line.chance)), _score(line.before), _score(line.after)
        verdict = line.best.verdict if line.best else ""
        table.add_row(Text(kind), Text(language), *cells, Text(verdict), style=None if line.kind else "bold")
    return table


def plan_line(run: ReportedRun) -> Text:
    """One line per run: each figure as predicted, as it came out, and the error."""
    parts = []
    for row in text_format.plan_rows(run):
        error = f" ({signed_percent(row.difference)})".replace("\u00a0", "") if row.difference is not None else ""
        parts.append(f"{row.name.lower()} {row.predicted} → {row.actual}{error}")
    line = Text(f"{run.name}, predicted → actual: ", style="bold")
    return line.append("; ".join(parts) if parts else "neither plan nor outcome was written", style="not bold")


def print_summary(record: ReportData, console: Console) -> None:
    """A short rendering of what was read, for the terminal."""
    for sentence in text_format.headline(record):
        console.print(words(sentence))
    for problem in record.problems:
        console.print(words(problem, style="yellow"))
    for run in record.runs:
        console.print(plan_line(run))
    for lines in (accuracy_lines(run.questions) for run in record.runs):
        if lines:
            console.print(accuracy_table(lines))
    if found := record.quickstart:
        for sentence in (text_format.stories_sentence(found), clip(found.compression.text("note"), 300)):
            console.print(words(sentence), end="\n" if sentence else "")
    if record.quickstart and (following := record.quickstart.facts.text("next")):
        console.print(Text("Next: ", style="bold").append(clip(following, 300), style="not bold"))
