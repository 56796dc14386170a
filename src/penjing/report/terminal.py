"""The report in a few lines of terminal: the same facts as the page, through `rich`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penjing.report import text_format as facts
from penjing.report.accuracy import Line, Score, accuracy_lines
from penjing.report.load_run import Record, Run, read_record
from penjing.report.text_format import NONE, clip, percent, signed_percent

SAMPLE_LETTERS = 240
LARGEST_TABLE = 40


def words(sentence: str, style: str = "") -> Text:
    """A sentence for the terminal: never markup, and no spaces before % (rich breaks lines at no-break spaces too)."""
    return Text(sentence.replace("\u00a0%", "%"), style=style)


def _score(score: Score | None) -> Text:
    if score is None:
        return Text(NONE)
    low, high = score.interval
    return words(f"{percent(score.fraction)} ({low * 100:.0f}–{high * 100:.0f})")


def _row(line: Line) -> tuple[Text, ...]:
    kind, language = clip(line.kind.replace("_", " "), 30) or "all kinds", clip(facts.language_name(line.language), 16)
    best = line.best
    verdict = Text(best.verdict if best else "")
    return Text(kind), Text(language), words(percent(line.chance)), _score(line.before), _score(line.after), verdict


def accuracy_table(lines: list[Line]) -> Table:
    """Right answers before and after fine-tuning, beside guessing; totals stand in bold."""
    table = Table(title="Right answers (95 % interval)", title_justify="left", title_style="bold")
    table.add_column("kind", overflow="fold")
    table.add_column("language")
    for name in ("guessing", "before", "after"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    shown = lines if len(lines) <= LARGEST_TABLE else [*lines[: LARGEST_TABLE - 1], lines[-1]]
    for index, line in enumerate(shown):
        last_kind = bool(line.kind) and index + 1 < len(shown) and not shown[index + 1].kind
        table.add_row(*_row(line), style=None if line.kind else "bold", end_section=last_kind)
    return table


def plan_line(run: Run) -> Text:
    """One line per stage: each figure as predicted, as it came out, and the error."""
    title = facts.RUN_TITLES[run.name][0]
    parts = []
    for row in facts.plan_rows(run):
        error = f" ({signed_percent(row.difference)})".replace("\u00a0", "") if row.difference is not None else ""
        parts.append(f"{row.name.lower()} {row.predicted} → {row.actual}{error}")
    line = Text(f"{title}, predicted → actual: ", style="bold")
    return line.append("; ".join(parts) if parts else "neither plan nor outcome was written", style="not bold")


def sample_lines(run: Run) -> list[Text]:
    """What the stage wrote last to the first prompt of each language (two at most)."""
    prompts: dict[str, str] = {}
    for sample in run.samples:
        prompts.setdefault(sample.language, sample.prompt)
    last = {sample.language: sample for sample in run.samples if sample.prompt == prompts[sample.language]}
    lines = []
    for sample in list(last.values())[:2]:
        line = Text(f"{facts.RUN_TITLES[run.name][0]}, step {sample.step:,}: ", style="dim")
        line.append(clip(sample.prompt, 100), style="bold not dim")
        lines.append(line.append(clip(sample.text, SAMPLE_LETTERS), style="not dim"))
    return lines


def print_record(record: Record, console: Console) -> None:
    """Print a record that has been read already."""
    for sentence in facts.headline(record):
        console.print(words(sentence))
    for problem in record.problems:
        console.print(words(problem, style="yellow"))
    for run in record.runs:
        console.print(plan_line(run))
    lines = accuracy_lines(record.evaluation.rows) if record.evaluation else []
    if lines:
        console.print(accuracy_table(lines))
    stories = facts.stories_sentence(record.evaluation.stories if record.evaluation else None)
    if stories:
        console.print(words(stories))
    if record.compression:
        console.print(words(facts.compression_sentence(record.compression)))
    for run in record.runs:
        for line in sample_lines(run):
            console.print(line)
    if record.quickstart and record.quickstart.next:
        console.print(Text("Next: ", style="bold").append(clip(record.quickstart.next, 300), style="not bold"))


def print_summary(folder: Path, console: Console) -> None:
    """A short rendering of the run in `folder` for the terminal. Raises `UserError` when the folder is not there."""
    print_record(read_record(folder), console)
