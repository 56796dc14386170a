"""The quickstart section of the page: stages, examples, data, tokenizer, machine, next step."""

from collections.abc import Callable, Sequence
from typing import Any

from penjing.base import formatting as units
from penjing.base.accuracy import AFTER, BEFORE
from penjing.base.untrusted import Fields, text
from penjing.devices.host import PROCESSOR
from penjing.report import text_format
from penjing.report.charts import figure
from penjing.report.load_runs import Quickstart, ReportedRun
from penjing.report.metrics import task_names
from penjing.report.text_format import NONE, clip, count, duration, kind_name, percent, shown
from penjing.track.run_dir import STAGES as TRAININGS
from penjing.track.run_record import continuation

Facts = list[tuple[str, str]]
FactTable = Sequence[tuple[str, str, Callable[[float], str] | None]]  # name, field, form of a number
View = dict[str, Any]

DATA_FACTS: FactTable = (
    ("Source", "source", None),
    ("Records read", "records", count),
    ("Left out by cleaning", "left_out", None),
    ("Changed by cleaning", "changed", None),
    ("Documents", "documents", count),
    ("Size", "bytes", units.megabytes),
    ("Training tokens", "tokens", count),
    ("Validation tokens", "validation_tokens", count),
    ("Bytes per token", "bytes_per_token", figure),
    ("Chinese characters", "han_fraction", percent),
)
MACHINE_FACTS: FactTable = (
    ("Processor", PROCESSOR, None),
    ("Cores", "cores", count),
    ("Threads used", "threads", count),
    ("Memory", "memory_bytes", units.gibibytes),
    ("Device", "device", None),
    ("Computed in", "compute_dtype", None),
)
VERSION_FACTS: FactTable = tuple((name, name.lower(), None) for name in ("penjing", "torch", "Command"))


MOST_ITEMS = 8  # prompts, examples, warnings; of tables some times as many lines
LONGEST = 360  # letters of a sample


def facts(fields: Fields, table: FactTable) -> Facts:
    """The known facts of a table, each clipped to a reasonable length."""
    rows = ((name, shown(fields.number(field), form) if form else fields.text(field)) for name, field, form in table)
    return [(clip(name, 60), clip(value, 300)) for name, value in rows if value not in ("", NONE)]


def quickstart_view(quickstart: Quickstart, runs: Sequence[ReportedRun]) -> View:
    found, evaluation = quickstart.facts, quickstart.evaluation
    tokenizer, data, choice = (found.fields(name) for name in ("tokenizer", "data", "choice"))
    examples = [example_cells(example) for example in evaluation.items("examples")]
    hashes = [(f"{task_names(run.task)[0]} weights, SHA-256", run.outcome.text("weights_sha256")) for run in runs]
    tokenizer_facts = [
        (kind_name(text(name)).capitalize(), name, None if tokenizer.number(name) is None else count)
        for name in list(tokenizer.raw)[:16]
    ]
    return {
        "stages": stage_rows(found),
        "examples": [
            (english, chinese, items)
            for english, chinese, right in (("Right", "答对", True), ("Wrong", "答错", False))
            if (items := [each for each in examples if each["right"] == right][:MOST_ITEMS])
        ],
        "stories_sentence": text_format.stories_sentence(quickstart),
        "stories": [
            {
                "prompt": clip(story.text("prompt"), 300),
                "text": clip(continuation(story), LONGEST),
                "language": story.text("language"),
            }
            for story in evaluation.fields("stories").items("examples")[:MOST_ITEMS]
        ],
        "data": facts(data, DATA_FACTS),
        "warnings": [clip(warning, 300) for warning in data.texts("warnings")[:MOST_ITEMS]],
        "tokenizer": facts(tokenizer, tokenizer_facts),
        "choice": clip(choice.text("why"), 300),
        "choice_rows": [(clip(row.text("name"), 60), clip(row.text("text"), 60)) for row in choice.items("rows")[:9]],
        "compression": clip(quickstart.compression.text("note"), 400),
        "machine": [
            *facts(found.fields("machine"), MACHINE_FACTS),
            *facts(found, VERSION_FACTS),
            *[(name, clip(value, 80)) for name, value in hashes if value],
        ],
        "export": clip(found.fields("export").text("path"), 200),
        "export_note": clip(found.fields("export").text("note"), 300),
        "next": clip(found.text("next"), 300),
    }


def stage_rows(facts: Fields) -> list[View]:
    """The timeline: each stage with its bar (style; it starts where the previous one ended), state, time and note."""
    stages = facts.items("stages")[: 4 * MOST_ITEMS]
    total, begin, rows = text_format.total_seconds(stages) or 0.0, 0.0, []
    for stage in stages:
        seconds = max(stage.number("seconds") or 0.0, 0.0)
        name, state, took = clip(stage.text("name"), 40), stage.text("state"), duration(stage.number("seconds"))
        kind = state if state in ("done", "skipped", "failed") else "other"
        rows.append(
            {
                "name": name,
                "state": kind,
                "word": clip(state, 20) or "unknown",
                "bar": f"margin-left: {begin / total:.1%}; width: {seconds / total:.1%}" if total else "",
                "time": took,
                "note": clip(stage.text("note"), 300),
            }
        )
        begin += seconds
    return rows


def example_cells(example: Fields) -> View:
    """One question with both replies and whether each is right; `right` is the last reply's verdict."""
    length = LONGEST // 2
    replies = [
        (
            BEFORE if stage == "pretrain" else AFTER,
            clip(example.text(stage), length),
            example.raw.get(f"{stage}_right") is True,
        )
        for stage in reversed(TRAININGS)
        if stage in example.raw
    ]
    return {
        "kind": kind_name(example.text("kind")),
        "language": example.text("language"),
        "question": clip(example.text("question"), length),
        "answer": clip(example.text("answer"), length),
        "replies": replies,
        "right": bool(replies) and replies[-1][-1],
    }
