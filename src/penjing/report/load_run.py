"""Read what a quickstart run left in its folder, once, into typed records that the page and the terminal both use.

Nothing here trusts the files: every part may be missing, half written or of another shape. A number that is not
finite becomes None, a text loses its control characters, and what could not be read becomes a sentence in `problems`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penjing.base.errors import UserError
from penjing.base.files import read_json

STAGES = ("pretrain", "sft")
LARGEST_NUMBER = 1e200  # beyond this the difference of two figures may overflow, and no run measures such a figure

# Control characters, terminal escapes and direction overrides: they could hide or reorder what stands next to them.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")

T = TypeVar("T")
Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the run took place."""

    cpu: str
    cores: int | None
    threads: int | None
    memory_bytes: float | None
    device: str
    compute_dtype: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One line of the quickstart's timeline; `state` is done, skipped or failed."""

    name: str
    state: str
    seconds: float | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text the model was made from."""

    source: str
    documents: int | None
    bytes: float | None
    tokens: int | None
    validation_tokens: int | None
    bytes_per_token: float | None
    han_fraction: float | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Export:
    """The exported model and whether its logits were compared with ours."""

    path: str
    verified: bool | None
    largest_logit_difference: float | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """`quickstart.json`. `tokenizer` keeps every scalar fact under its own name."""

    title: str
    created: str
    command: str
    penjing: str
    torch: str
    next: str
    machine: Machine | None
    stages: tuple[Stage, ...]
    data: Data | None
    tokenizer: Mapping[str, str | float]
    export: Export | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was predicted before a stage began; `level` is probe (measured for a moment first) or estimate."""

    parameters: int | None
    parameters_without_embedding: int | None
    tokens: int | None
    steps: int | None
    flops: float | None
    flops_per_token: float | None
    predicted_seconds: float | None
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    predicted_peak_memory_bytes: float | None
    tokens_per_second: float | None
    level: str
    tokens_per_step: int | None
    epochs: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a stage took and reached; `resumed` counts how often it was taken up again."""

    seconds: float | None
    training_seconds: float | None
    validation_seconds: float | None
    checkpoint_seconds: float | None
    other_seconds: float | None
    tokens: int | None
    tokens_per_second: float | None
    mfu: float | None
    mfu_full_square: float | None
    peak_memory_bytes: float | None
    final_loss_nats_per_token: float | None
    validation_loss_nats_per_token: float | None
    validation_bits_per_byte: float | None
    resumed: int | None
    weights_sha256: str


@dataclass(frozen=True, kw_only=True)
class TrainPoint:
    """One training line of `metrics.jsonl`."""

    step: int
    tokens: int | None
    loss_nats_per_token: float | None
    learning_rate: float | None
    gradient_norm: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class ValidationPoint:
    """One validation line of `metrics.jsonl`."""

    step: int
    tokens: int | None
    validation_loss_nats_per_token: float | None
    validation_bits_per_byte: float | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text the model wrote at one step. `text` is the continuation alone: a repeated prompt is cut off."""

    step: int
    prompt: str
    text: str
    language: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training stage: its plan, outcome, curves (one point per step, in order) and samples."""

    name: str
    plan: Plan | None
    outcome: Outcome | None
    training: tuple[TrainPoint, ...]
    validation: tuple[ValidationPoint, ...]
    samples: tuple[Sample, ...]

    @property
    def empty(self) -> bool:
        return not (self.plan or self.outcome or self.training or self.validation or self.samples)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One count of right answers; `chance` is what guessing would get, as a fraction."""

    stage: str
    kind: str
    language: str
    asked: int
    right: int
    chance: float | None


@dataclass(frozen=True, kw_only=True)
class Story:
    """One story the finished model wrote."""

    prompt: str
    text: str
    language: str


@dataclass(frozen=True, kw_only=True)
class Stories:
    """How many stories hold every word they were asked to use."""

    asked: int | None
    with_required_words: int | None
    examples: tuple[Story, ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question with the expected answer and both replies.

    `pretrain_right` and `sft_right` are the evaluation's verdicts where it wrote them, else None.
    """

    kind: str
    language: str
    question: str
    answer: str
    pretrain: str
    sft: str
    pretrain_right: bool | None
    sft_right: bool | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`evaluation.json`."""

    questions: int | None
    rows: tuple[Row, ...]
    stories: Stories | None
    examples: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Compression:
    """`compression.json`: the model against a general compressor on the same bytes."""

    validation_bytes: float | None
    zstd_19_bits_per_byte: float | None
    model_bits_per_byte: float | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything known about one quickstart run. `problems` are sentences about what could not be read."""

    folder: str
    quickstart: Quickstart | None
    runs: tuple[Run, ...]
    evaluation: Evaluation | None
    compression: Compression | None
    problems: tuple[str, ...]

    def run(self, name: str) -> Run | None:
        return next((run for run in self.runs if run.name == name), None)


def number(value: object) -> float | None:
    """A finite number of a sane size, else None (booleans and texts are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) and abs(real) <= LARGEST_NUMBER else None


def whole(value: object) -> int | None:
    """A finite number as a whole one, else None."""
    real = number(value)
    return None if real is None else round(real)


def flag(value: object) -> bool | None:
    """True or False as written, else None."""
    return value if isinstance(value, bool) else None


def text(value: object) -> str:
    """A text that can be shown and encoded: no lone surrogates, control characters or direction overrides."""
    if value is None or isinstance(value, Mapping | list):
        return ""
    plain = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", plain)


_READERS: dict[str, Callable[[object], object]] = {
    "str": text,
    "int": lambda value: whole(value) or 0,
    "int | None": whole,
    "float | None": number,
    "bool | None": flag,
}


def fill(kind: type[T], raw: Json, **given: object) -> T:
    """Make a record of type `kind` from `raw`: each field is read by its annotation unless it is `given`."""
    values: dict[str, object] = dict(given)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in values:
            values[field.name] = _READERS[str(field.type)](raw.get(field.name))
    return kind(**values)


def mapping(value: object) -> Json:
    """`value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def objects(value: object) -> list[Json]:
    """The JSON objects in a JSON list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def read_object(path: Path, problems: list[str]) -> Json | None:
    """The JSON object in `path`; None when there is no such file, or (said in `problems`) when it cannot be read."""
    if not path.exists():
        return None
    try:
        value = read_json(path)
    except (UserError, OSError, ValueError, RecursionError):
        problems.append(f"{path.parent.name}/{path.name} is there but cannot be read, so it is left out.")
        return None
    if not isinstance(value, Mapping):
        problems.append(f"{path.parent.name}/{path.name} does not hold a JSON object, so it is left out.")
        return None
    return value


def read_lines(path: Path, problems: list[str]) -> Iterator[Json]:
    """The JSON objects of a JSONL file. Broken lines (a run killed while writing) are counted in `problems`."""
    if not path.exists():
        return
    broken = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                try:
                    value = json.loads(line) if line.strip() else None
                except (ValueError, RecursionError):
                    value = ()
                if isinstance(value, Mapping):
                    yield value
                elif value is not None:
                    broken += 1
    except OSError:
        problems.append(f"{path.parent.name}/{path.name} is there but cannot be read, so it is left out.")
    if broken:
        lines = "1 line" if broken == 1 else f"{broken} lines"
        problems.append(f"{lines} of {path.parent.name}/{path.name} cannot be read and are left out.")


def later_wins(lines: Sequence[Json], kind: type[T], *marks: str) -> tuple[T, ...]:
    """The lines that hold one of `marks`, one per step and in order of steps: a resumed run repeats steps."""
    points: dict[int, T] = {}
    for line in lines:
        step = whole(line.get("step"))
        if step is not None and any(mark in line for mark in marks):
            points[step] = fill(kind, line, step=step)
    return tuple(points[step] for step in sorted(points))


def continuation(raw: Json) -> str:
    """What the model wrote after the prompt."""
    written, prompt = text(raw.get("text")), text(raw.get("prompt"))
    return written[len(prompt) :] if prompt and written.startswith(prompt) else written


def read_samples(lines: Iterator[Json]) -> tuple[Sample, ...]:
    """Samples in order of steps; the later line wins for the same step and prompt."""
    samples: dict[tuple[int, str], Sample] = {}
    for line in lines:
        step = whole(line.get("step"))
        if step is not None:
            sample = fill(Sample, line, step=step, text=continuation(line))
            samples[step, sample.prompt] = sample
    return tuple(sorted(samples.values(), key=lambda sample: sample.step))


def read_run(folder: Path, name: str, problems: list[str]) -> Run:
    """One training stage's folder."""
    plan = read_object(folder / name / "plan.json", problems)
    outcome = read_object(folder / name / "outcome.json", problems)
    lines = list(read_lines(folder / name / "metrics.jsonl", problems))
    return Run(
        name=name,
        plan=None if plan is None else fill(Plan, plan),
        outcome=None if outcome is None else fill(Outcome, outcome),
        training=later_wins(lines, TrainPoint, "loss_nats_per_token"),
        validation=later_wins(lines, ValidationPoint, "validation_loss_nats_per_token", "validation_bits_per_byte"),
        samples=read_samples(read_lines(folder / name / "samples.jsonl", problems)),
    )


def read_data(raw: Json) -> Data:
    """The `data` part of `quickstart.json`."""
    warnings = raw.get("warnings")
    return fill(Data, raw, warnings=tuple(map(text, warnings)) if isinstance(warnings, list) else ())


def read_tokenizer(raw: Json) -> dict[str, str | float]:
    """Every scalar fact about the tokenizer, under its own name."""
    facts: dict[str, str | float] = {}
    for name, value in raw.items():
        real = number(value)
        if real is not None:
            facts[text(name)] = real
        elif isinstance(value, str | bool):
            facts[text(name)] = text(value)
    return facts


def read_quickstart(raw: Json) -> Quickstart:
    """`quickstart.json`."""
    machine, data, export = (mapping(raw.get(name)) for name in ("machine", "data", "export"))
    return fill(
        Quickstart,
        raw,
        machine=fill(Machine, machine) if machine else None,
        stages=tuple(fill(Stage, stage) for stage in objects(raw.get("stages"))),
        data=read_data(data) if data else None,
        tokenizer=read_tokenizer(mapping(raw.get("tokenizer"))),
        export=fill(Export, export) if export else None,
    )


def read_row(raw: Json) -> Row:
    """One count of right answers, with 0 <= right <= asked and a chance that is a fraction."""
    asked = max(whole(raw.get("asked")) or 0, 0)
    chance = number(raw.get("chance"))
    inside = chance is not None and 0 <= chance <= 1
    right = min(max(whole(raw.get("right")) or 0, 0), asked)
    return fill(Row, raw, asked=asked, right=right, chance=chance if inside else None)


def read_evaluation(raw: Json) -> Evaluation:
    """`evaluation.json`."""
    stories = mapping(raw.get("stories"))
    told = tuple(fill(Story, story, text=continuation(story)) for story in objects(stories.get("examples")))
    return fill(
        Evaluation,
        raw,
        rows=tuple(map(read_row, objects(raw.get("rows")))),
        stories=fill(Stories, stories, examples=told) if stories else None,
        examples=tuple(fill(Example, example) for example in objects(raw.get("examples"))),
    )


def read_record(folder: Path) -> Record:
    """Read a quickstart run's folder. A `UserError` only when the folder itself is not there."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError("no such folder", where=folder, next_step="Give the folder of a quickstart run.")
    problems: list[str] = []
    quickstart = read_object(folder / "quickstart.json", problems)
    evaluation = read_object(folder / "evaluation.json", problems)
    compression = read_object(folder / "compression.json", problems)
    runs = tuple(read_run(folder, name, problems) for name in STAGES)
    return Record(
        folder=text(folder),
        quickstart=None if quickstart is None else read_quickstart(quickstart),
        runs=tuple(run for run in runs if not run.empty),
        evaluation=None if evaluation is None else read_evaluation(evaluation),
        compression=None if compression is None else fill(Compression, compression),
        problems=tuple(text(problem) for problem in problems),
    )
