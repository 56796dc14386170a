"""Read the files of runs, once, for the page and the terminal.

The files are not trusted: every part may be missing, partially written or of another type. A number that is not finite
becomes None, text loses its control characters, and an unreadable file becomes a sentence in `problems`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penjing.base import config
from penjing.base.accuracy import AFTER, BEFORE, Score, Scores
from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.base.lock import is_locked
from penjing.track import jsonl

STAGES = {"pretrain": BEFORE, "sft": AFTER}  # the runs of a quickstart, and when its questions were asked
RUN_FILES = ("run.toml", "metrics.jsonl", "plan.json", "outcome.json")
NAME_LENGTH = 40  # maximum characters of a run's name, from the end
MAX_NUMBER = 1e200  # beyond this the difference of two numbers may overflow; no run measures such values

# Control characters, terminal escapes and direction overrides: they could hide or reorder the text next to them.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")

Json = Mapping[str, Any]


def number(value: object) -> float | None:
    """A finite number of reasonable size, else None (booleans and strings are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) and abs(real) <= MAX_NUMBER else None


def text(value: object) -> str:
    """Printable, encodable text: no lone surrogates, control characters or direction overrides."""
    if value is None or isinstance(value, Mapping | list):
        return ""
    plain = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", plain)


@dataclass(frozen=True)
class Fields:
    """A JSON object from a file: each field is read as its expected type, or as empty."""

    raw: Json = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.raw)

    def number(self, name: str) -> float | None:
        return number(self.raw.get(name))

    def text(self, name: str) -> str:
        return text(self.raw.get(name))

    def fields(self, name: str) -> Fields:
        value = self.raw.get(name)
        return Fields(value) if isinstance(value, Mapping) else Fields()

    def items(self, name: str) -> tuple[Fields, ...]:
        """The JSON objects in a JSON list."""
        value = self.raw.get(name)
        return tuple(Fields(entry) for entry in value if isinstance(entry, Mapping)) if isinstance(value, list) else ()

    def texts(self, name: str) -> tuple[str, ...]:
        """The entries of a JSON list as texts."""
        value = self.raw.get(name)
        return tuple(map(text, value)) if isinstance(value, list) else ()


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """One training run. `figures`: values by step, for each metric. `samples`: the model's text by step, for each
    prompt (text, language)."""

    folder: str
    name: str
    task: str  # objective.name, or data.format for next-token prediction; empty if unknown
    settings: Mapping[str, str]
    defaults: Mapping[str, str]  # of its recipe; empty if the recipe is unknown
    plan: Fields
    outcome: Fields
    figures: Mapping[str, Mapping[int, float]]
    samples: Mapping[tuple[str, str], Mapping[int, str]]
    questions: Scores
    incidents: tuple[Fields, ...]
    running: bool

    @property
    def last_step(self) -> int:
        return max((max(values) for values in self.figures.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Files of a quickstart besides its runs: quickstart.json, evaluation.json and compression.json."""

    facts: Fields
    evaluation: Fields
    compression: Fields


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything a report shows. `problems`: sentences about unreadable files."""

    folder: str
    runs: tuple[ReportedRun, ...]
    quickstart: Quickstart | None  # of a report on one quickstart
    problems: tuple[str, ...]


def read_file(path: Path, load: Callable[[Path], Any], problems: list[str]) -> Any:
    """The file loaded by `load`; None if it is missing, or unreadable (then noted in `problems`)."""
    try:
        return load(path) if path.exists() else None
    except (UserError, OSError, ValueError, RecursionError):
        problems.append(f"{path.parent.name}/{path.name} cannot be read, so it is left out.")
        return None


def read_object(path: Path, problems: list[str]) -> Fields:
    def load(path: Path) -> Json:
        value = read_json(path)
        if not isinstance(value, Mapping):
            raise ValueError("no JSON object")
        return value

    return Fields(read_file(path, load, problems) or {})


def read_lines(path: Path, problems: list[str]) -> list[Fields]:
    """The complete lines of a JSONL file."""
    return [Fields(line) for line in read_file(path, jsonl.read_lines, problems) or ()]


def read_figures(lines: Iterable[Fields]) -> dict[str, dict[int, float]]:
    """Values by step, sorted, for each metric. A resumed run repeats steps: the later line wins."""
    figures: dict[str, dict[int, float]] = {}
    for line in lines:
        step = line.number("step")
        for name in line.raw if step is not None and step >= 0 else ():
            value = line.number(name)
            if value is not None and name != "step":
                figures.setdefault(text(name), {})[round(step or 0)] = value
    return {name: dict(sorted(values.items())) for name, values in figures.items()}


def continuation(sample: Fields) -> str:
    """The model's text after the prompt."""
    written, prompt = sample.text("text"), sample.text("prompt")
    return written[len(prompt) :] if prompt and written.startswith(prompt) else written


def read_samples(lines: Iterable[Fields]) -> dict[tuple[str, str], dict[int, str]]:
    """Continuations by step, sorted, for each prompt. A resumed run repeats steps: the later line wins."""
    samples: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        if (step := line.number("step")) is not None:
            samples.setdefault((line.text("prompt"), line.text("language")), {})[round(step)] = continuation(line)
    return {prompt: dict(sorted(texts.items())) for prompt, texts in samples.items()}


def read_scores(rows: Iterable[tuple[str, Fields]]) -> Scores:
    """Counts of right answers, before and after training: 0 <= right <= asked, and the chance level as a fraction."""
    scores = {}
    for when, row in rows:
        asked = max(round(row.number("asked") or 0), 0)
        right = min(max(round(row.number("right") or 0), 0), asked)
        chance = row.number("chance")
        is_fraction = chance is not None and 0 <= chance <= 1
        key = (when, row.text("kind"), row.text("language"))
        scores[key] = Score(total=asked, correct=right, chance=chance if is_fraction else None)
    return scores


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `table.name`, with values as text."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            flat[prefix + text(name)] = text(str(shown).lower() if isinstance(shown, bool) else shown)
    return flat


def read_run(folder: Path, problems: list[str]) -> ReportedRun:
    """One run's folder."""
    settings = flatten(read_file(folder / "run.toml", config.read_toml, problems) or {})
    outcome = read_object(folder / "outcome.json", problems)
    questions = read_object(folder / "questions.json", problems)
    task = settings.get("objective.name", "")
    return ReportedRun(
        folder=text(folder),
        name=text(folder.resolve().name),
        task=settings.get("data.format", task) if task == "next_token" else task,
        settings=settings,
        defaults={},
        plan=read_object(folder / "plan.json", problems),
        outcome=outcome,
        figures=read_figures(read_lines(folder / "metrics.jsonl", problems)),
        samples=read_samples(read_lines(folder / "samples.jsonl", problems)),
        questions=read_scores((when, row) for when in STAGES.values() for row in questions.fields(when).items("rows")),
        incidents=tuple(read_lines(folder / "incidents.jsonl", problems)),
        running=not outcome and is_locked(folder),
    )


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run's folder, not a checkpoint."""
    return any((folder / name).is_file() for name in RUN_FILES) and not (folder / "MANIFEST.json").exists()


def read_quickstart(folder: Path, problems: list[str]) -> tuple[Quickstart, tuple[ReportedRun, ...]]:
    """A quickstart's folder. The answers of both models belong to the last run."""
    quickstart = Quickstart(
        facts=read_object(folder / "quickstart.json", problems),
        evaluation=read_object(folder / "evaluation.json", problems),
        compression=read_object(folder / "compression.json", problems),
    )
    runs = [read_run(folder / name, problems) for name in STAGES if is_run(folder / name)]
    runs = [replace(run, task=run.task or {"pretrain": "documents", "sft": "chats"}[run.name]) for run in runs]
    rows = quickstart.evaluation.items("rows")
    if runs and rows:
        answered = read_scores((STAGES[row.text("stage")], row) for row in rows if row.text("stage") in STAGES)
        runs[-1] = replace(runs[-1], questions=answered)
    return quickstart, tuple(runs)


def distinct_names(runs: Sequence[ReportedRun]) -> tuple[ReportedRun, ...]:
    """The runs, named by the shortest ends of their paths that differ."""
    parts = [Path(run.folder).resolve().parts for run in runs]
    names: list[str] = []
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            break
    return tuple(replace(run, name=text(name)[-NAME_LENGTH:]) for run, name in zip(runs, names, strict=True))


def read_record(folders: Sequence[Path]) -> ReportData:
    """Read runs and quickstarts. Raises UserError for a folder that is neither."""
    problems: list[str] = []
    runs: list[ReportedRun] = []
    quickstarts = []
    for folder in dict.fromkeys(map(Path, folders)):
        if is_run(folder):
            runs.append(read_run(folder, problems))
        elif (folder / "quickstart.json").is_file() or any(is_run(folder / name) for name in STAGES):
            quickstart, found = read_quickstart(folder, problems)
            quickstarts.append(quickstart)
            runs += found
        else:
            what = "no run in this folder" if folder.is_dir() else "no such folder"
            raise UserError(what, where=folder, wanted="a folder made by `penjing train` or `penjing quickstart`")
    return ReportData(
        folder=", ".join(text(folder) for folder in folders),
        runs=distinct_names(runs),
        quickstart=quickstarts[0] if quickstarts and len(folders) == 1 else None,
        problems=tuple(text(problem) for problem in problems),
    )
