"""A short version of the report for the terminal, printed with `rich`."""

from rich.console import Console
from rich.text import Text

from penjing.base.accuracy import AccuracyLine, Score, Scores, accuracy_lines, change_lines
from penjing.base.markup import print_table
from penjing.report import text_format
from penjing.report.load_runs import ReportData, ReportedRun
from penjing.report.text_format import NONE, clip, kind_name, percent, signed_percent

MAX_TABLE_ROWS = 40


def sentence_text(sentence: str, style: str = "") -> Text:
    """A sentence for the terminal: never markup, and no spaces before % (rich breaks lines at no-break spaces too)."""
    return Text(sentence.replace("\u00a0%", "%"), style=style)


def _score(score: Score) -> str:
    if not score:
        return NONE
    low, high = score.interval
    return f"{percent(score.fraction)} ({low * 100:.0f}–{high * 100:.0f})"


def print_accuracy(lines: list[AccuracyLine], console: Console) -> None:
    """Print right answers before and after training, and the chance level; totals are bold."""
    rows = []
    for line in lines if len(lines) <= MAX_TABLE_ROWS else [*lines[: MAX_TABLE_ROWS - 1], lines[-1]]:
        names = kind_name(line.kind), clip(text_format.language_name(line.language), 16)
        counts = (f"{line.best.total:,}", percent(line.best.chance))
        cells = (*names, *counts, _score(line.before), _score(line.after), line.verdict)
        rows.append([sentence_text(cell, "" if line.kind else "bold") for cell in cells])
    headings = ("kind", "language", "asked>", "guessing>", "before>", "after>", "")
    print_table(console, headings, rows, title="Right answers (95 % interval)")


def print_changes(questions: Scores, console: Console) -> None:
    """Print what training changed in each kind of question, and a sentence that names those which got worse."""
    print_accuracy(change_lines(questions), console)
    console.print(sentence_text(text_format.regression_sentence(questions)))


def plan_line(run: ReportedRun) -> Text:
    """One line per run: predicted and actual of each figure, and the error."""
    parts = []
    for row in text_format.plan_rows(run):
        error = f" (off by {signed_percent(row.error)})".replace("\u00a0", "") if row.error is not None else ""
        parts.append(f"{row.name.lower()} {row.predicted} → {row.actual}{error}")
    line = Text(f"{run.name}, predicted → actual: ", style="bold")
    return line.append("; ".join(parts) if parts else "neither plan nor outcome was written", style="not bold")


def print_summary(record: ReportData, console: Console) -> None:
    for sentence in text_format.headline(record):
        console.print(sentence_text(sentence))
    for problem in record.problems:
        console.print(sentence_text(problem, style="yellow"))
    for run in record.runs:
        console.print(plan_line(run))
    for lines in (accuracy_lines(run.questions) for run in record.runs):
        if lines:
            print_accuracy(lines, console)
    if found := record.quickstart:
        for sentence in (text_format.stories_sentence(found), clip(found.compression.text("note"), 300)):
            console.print(sentence_text(sentence), end="\n" if sentence else "")
    if record.quickstart and (following := record.quickstart.facts.text("next")):
        console.print(Text("Next: ", style="bold").append(clip(following, 300), style="not bold"))
