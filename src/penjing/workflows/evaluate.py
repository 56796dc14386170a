"""penjing eval: scores on tasks, bits per byte of text.

Training skips broken records; evaluation stops at the first one, so that every figure covers the full file.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.base.registry import look_up
from penjing.data import formats as records
from penjing.eval import TASKS
from penjing.eval.scorer import Graded, grade
from penjing.eval.scores import paired_change, summary
from penjing.eval.suite import Suite
from penjing.eval.task import METRICS
from penjing.eval.text import score_texts, zstd_bits_per_byte
from penjing.train.load_model import LoadedModel, load_trained, set_threads, use_device

ROW_TOKENS = 1024  # rows of a text are at least this long, if the context of the model is
WRONG_SHOWN, LONGEST_SHOWN = 5, 100  # wrong answers that are printed, and characters of each of their texts
HEADINGS = ("task", "asked>", "shots>", "score>", "s.e.>", "95 %>", "chance>", "uniform>", "ties>")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How models are asked. thinking, max_tokens: see `scorer.grade`. details: print every kind of a benchmark."""

    thinking: bool | None = None
    max_tokens: int = 0
    device: str = "auto"
    dtype: str = "auto"
    details: bool = False
    as_json: bool = False


def evaluate(
    paths: Sequence[Path], suite: Suite, texts: Sequence[Path], console: Console, options: EvalOptions
) -> None:
    """Print the scores of models on tasks, and their bits per byte of a text. Raises UserError if nothing is given."""
    if not suite.tasks and not texts:
        next_step = "Give --tasks NAME,..., --questions FILE or --text FILE; penjing eval --list shows the tasks."
        raise UserError("nothing to evaluate on", next_step=next_step)
    set_threads(0, 1)
    shown = Console(quiet=True) if options.as_json else console
    asked = {name: suite.requests(name) for name in suite.tasks}  # so that a broken file costs no other task's scores
    runs: list[dict[str, Any]] = []
    first_graded: dict[str, list[Graded]] = {}
    for path in paths:
        if len(paths) > 1:
            shown.print(str(path), markup=False, highlight=False)
        trained = load_trained(path)
        model, tokenizer = trained.model, trained.tokenizer
        use_device(model, options.device, options.dtype)
        rows: list[dict[str, Any]] = []
        shown_answers: dict[str, list[Graded]] = {}
        for name, task in suite.tasks.items():
            start = time.perf_counter()
            graded = grade(
                task, asked[name], model, tokenizer, thinking=options.thinking, max_tokens=options.max_tokens
            )
            row = {**summary(name, task, graded), "seconds": time.perf_counter() - start}
            if (before := first_graded.setdefault(name, graded)) is not graded:
                row["change"], row["change_standard_error"] = paired_change(before, graded)
            rows.append(row)
            if task.shows_answers:
                shown_answers[name] = graded
        if rows:
            print_scores(rows, shown_answers, shown, details=options.details)
        runs.append({"run": str(path), "tasks": rows})
        if texts:
            runs[-1]["text"] = print_bits(trained, texts, shown)
    if len(paths) > 1:
        print_comparison(runs, shown)
    if options.as_json:
        console.print_json(json.dumps({"limit": suite.limit, "runs": runs}))


def print_scores(
    rows: Sequence[Row], answers: Mapping[str, Sequence[Graded]], console: Console, *, details: bool
) -> None:
    """A line for each task and below it one for each group; with details, and of tasks with answers, one for each kind.
    Then notes, and some of the wrong answers."""
    cells = []
    for row in rows:
        cells += [_cells(row["task"], row), *(_cells(f"  {part['name']}", part) for part in row["groups"])]
        if details or row["task"] in answers:
            cells += [_cells(f"  {part['name']} {part['language']}".rstrip(), part) for part in row["kinds"]]
    columns = zip((*HEADINGS, *(f"{metric}>" for metric in METRICS)), *cells, strict=True)
    headings, *lines = zip(*(column for column in columns if any(cell != "" for cell in column[1:])), strict=True)
    print_table(console, headings, lines)
    for row in rows:
        print_notes(row, console)
        print_wrong(answers.get(row["task"], ()), console)


def _cells(name: str, row: Row) -> list[object]:
    low, high = row["interval"]
    scores = (_percent(row["score"]), _percent(row["standard_error"], 2), f"{100 * low:.1f}-{100 * high:.1f}")
    others = (row.get(name) for name in ("chance", "uniform", "ties", *METRICS))
    return [name, row["asked"], row.get("shots", ""), *scores, *map(_percent, others)]


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f}"


def print_notes(row: Row, console: Console) -> None:
    """Further figures of a task, and what belongs beside its score."""
    notes = [f"{name} {value:.4g}" for name, value in row.get("figures", {}).items()]
    if row["metric"] != "acc":
        notes.append(f"the score is {row['metric']}")
    if row["truncated"]:
        notes.append(f"{row['truncated']} do not fit: beginning cut off, or end (--max-tokens)")
    for note in (*notes, *row["notes"]):
        console.print(escape_markup(row["task"], note, indent=""))


def print_comparison(runs: Sequence[Row], console: Console) -> None:
    """The score of each run on each task, and its change from the first with its standard error, over the same
    requests."""
    cells = []
    for tasks in zip(*(run["tasks"] for run in runs), strict=True):
        first, *others = tasks
        line = [first["task"], _percent(first["chance"]), _percent(first["score"])]
        for row in others:
            error = row["change_standard_error"]
            line += [_percent(row["score"]), f"{100 * row['change']:+.1f} ± {_percent(error) or '?'}"]
        cells.append(line)
    if all("text" in run for run in runs):
        for name, key, form in (("bits per byte", "bits_per_byte", ".4f"), ("  window, tokens", "window_tokens", ",")):
            first_value, *values = (run["text"][key] for run in runs)
            more = (cell for value in values for cell in (f"{value:{form}}", f"{value - first_value:+{form}}"))
            cells.append([name, "", f"{first_value:{form}}", *more])
    others = [heading for run in runs[1:] for heading in (f"{run['run']}>", "change>")]
    print_table(console, ("task", "chance>", f"{runs[0]['run']}>", *others), cells)


def print_wrong(graded: Sequence[Graded], console: Console) -> None:
    """Some of the wrong answers."""
    wrong = [answer for answer in graded if not answer.is_correct]
    for answer in wrong[:: max(1, -(-len(wrong) // WRONG_SHOWN))]:  # spread over the requests, and so over the kinds
        asked, said, wanted = map(_short, (answer.request.text, answer.text, answer.request.wanted))
        line = f"{asked} -> {said or 'nothing'}; wanted {wanted}"
        console.print(escape_markup("wrong", line, indent=""), soft_wrap=True)


def _short(text: str) -> str:
    """A text on one line, its end if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_SHOWN else "..." + line[3 - LONGEST_SHOWN :]


def print_bits(trained: LoadedModel, sources: Sequence[Path], console: Console) -> dict[str, Any]:
    """Print bits per byte of each text, for the model and for zstd -19, and perplexity by position; returns those of
    all texts, and of each."""
    rows: list[dict[str, Any]] = []
    # Runs on few conversations have short rows, and external models have no row length.
    seq_len = max(trained.run.data.seq_len, min(ROW_TOKENS, trained.context_tokens))
    for source in sources:
        texts = [document.text for document in records.read_documents([source])]
        score = score_texts(trained.model, trained.tokenizer, texts, seq_len=seq_len)
        found = {"source": str(source), "bits_per_byte": score.bits, "bytes": score.num_bytes}
        rows.append({**found, "zstd": zstd_bits_per_byte("\n".join(texts)), "perplexity": score.perplexities()})
    total: dict[str, Any] = {"window_tokens": seq_len, "bytes": sum(row["bytes"] for row in rows)}
    for name in ("bits_per_byte", "zstd"):
        total[name] = sum(row[name] * row["bytes"] for row in rows) / max(1, total["bytes"])
    for row in [*rows, {"source": "all", **total}][: None if len(rows) > 1 else 1]:
        bits = f"{row['bits_per_byte']:.4f} bits per byte in windows of {seq_len:,} tokens; zstd -19: {row['zstd']:.4f}"
        console.print(f"{row['source']}: {units.megabytes(row['bytes'])}, {bits}", highlight=False)
    parts = {part["first"]: f"{part['first']}-{part['last']}" for row in rows for part in row["perplexity"]}
    values = ({part["first"]: f"{part['perplexity']:.4g}" for part in row["perplexity"]} for row in rows)
    cells = [[row["source"], *(own.get(first, "") for first in parts)] for row, own in zip(rows, values, strict=True)]
    print_table(console, ("perplexity at token", *(f"{name}>" for name in parts.values())), cells)
    return {**total, "sources": rows}


def print_tasks(console: Console) -> None:
    """The tasks, with chance, solved examples, how choices are compared, and the files that they read."""
    tasks = [(name, look_up(TASKS, name, what="task")) for name in TASKS]
    cells = [
        (name, one.chance, one.shots, one.metric, " or ".join(getattr(one, "patterns", ()))) for name, one in tasks
    ]
    print_table(console, ("task", "chance>", "shots>", "score", "files below --data DIR"), cells)
