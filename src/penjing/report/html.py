"""`report.html`: one self-contained page about a quickstart run, opened from disk, without script or network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penjing.base import formatting as units
from penjing.base.files import write_text
from penjing.report import charts
from penjing.report import text_format as facts
from penjing.report.accuracy import Line, Score, accuracy_lines
from penjing.report.charts import Axis, Bar, Group, Series
from penjing.report.load_run import Evaluation, Example, Quickstart, Record, Run, read_record
from penjing.report.text_format import NONE, clip, count, duration, percent, shown

FILE_NAME = "report.html"
LARGEST_PAGE_BYTES = 500_000
TOKENS_AXIS = Axis("tokens trained on")
BEFORE_AFTER = ("before fine-tuning", "after fine-tuning")

Facts = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much of a run is shown, so that the page stays below `LARGEST_PAGE_BYTES`."""

    points: int  # per curve
    letters: int  # per sample or reply
    steps: int  # samples side by side
    items: int  # prompts, examples, warnings, lines of a table


LIMITS = (
    Limits(points=160, letters=360, steps=4, items=8),
    Limits(points=60, letters=200, steps=3, items=4),
    Limits(points=24, letters=100, steps=2, items=3),
)


def known(rows: Iterable[tuple[str, str]]) -> Facts:
    """The facts that are known, each clipped to a sane length."""
    return [(clip(name, 60), clip(value, 300)) for name, value in rows if value not in ("", NONE)]


def stage_rows(quick: Quickstart | None, limits: Limits) -> list[dict[str, Any]]:
    """The timeline: each stage with its bar (beginning where the one before ended), state, time and note."""
    stages = quick.stages[: 4 * limits.items] if quick else ()
    total, begin, rows = facts.total_seconds(stages) or 0.0, 0.0, []
    for stage in stages:
        seconds = max(stage.seconds or 0.0, 0.0)
        state = stage.state if stage.state in ("done", "skipped", "failed") else "other"
        note = f"{clip(stage.name, 40)}: {duration(stage.seconds)}"
        rows.append(
            {
                "name": clip(stage.name, 40),
                "chinese": facts.STAGE_TITLES.get(stage.name, ""),
                "state": state,
                "word": clip(stage.state, 20) or "unknown",
                "bar": charts.span_bar(begin, seconds, total, state, note),
                "time": duration(stage.seconds),
                "note": clip(stage.note, 300),
            }
        )
        begin += seconds
    return rows


def loss_charts(run: Run, limits: Limits) -> list[tuple[str, Markup]]:
    """Loss (training and validation) and bits per byte over tokens, with captions; only those that have points."""
    name = facts.RUN_TITLES[run.name][0]
    training = [(point.tokens, point.loss_nats_per_token) for point in run.training]
    validation = [(point.tokens, point.validation_loss_nats_per_token) for point in run.validation]
    bits = [(point.tokens, point.validation_bits_per_byte) for point in run.validation]
    loss = charts.line_chart(
        [Series("training", training), Series("validation", validation, dots=True)],
        title=f"{name}: loss over tokens",
        x=TOKENS_AXIS,
        y=Axis("nats per token"),
        limit=limits.points,
    )
    bytes_chart = charts.line_chart(
        [Series("validation", bits, dots=True, colour=1)],
        title=f"{name}: validation bits per byte over tokens",
        x=TOKENS_AXIS,
        y=Axis("bits per byte (validation)"),
        limit=limits.points,
    )
    return [(name, chart) for name, chart in (("Loss 损失", loss), ("Unseen text 验证集", bytes_chart)) if chart]


def small_charts(run: Run, limits: Limits) -> list[Markup]:
    """Learning rate, speed and gradient norm, small."""
    kinds = (
        ("learning_rate", Axis("learning rate", from_zero=True)),
        ("tokens_per_second", Axis("tokens/s", from_zero=True)),
        ("gradient_norm", Axis("gradient norm (log)", log=True)),
    )
    drawn = [
        charts.line_chart(
            [Series(axis.label, [(point.tokens, getattr(point, field)) for point in run.training])],
            title=f"{facts.RUN_TITLES[run.name][0]}: {axis.label} over tokens",
            x=TOKENS_AXIS,
            y=axis,
            width=320,
            height=180,
            limit=limits.points // 2,
        )
        for field, axis in kinds
    ]
    return [chart for chart in drawn if chart]


def sample_groups(run: Run, limits: Limits) -> list[dict[str, Any]]:
    """Per prompt, what the model wrote at a few growing steps."""
    groups = []
    prompts = list(dict.fromkeys(sample.prompt for sample in run.samples))
    for prompt in prompts[: limits.items]:
        texts = {sample.step: sample for sample in run.samples if sample.prompt == prompt}
        steps = facts.spread(list(texts), limits.steps)
        cells = [(f"step {step:,}", clip(texts[step].text, limits.letters)) for step in steps]
        groups.append({"prompt": clip(prompt, 300), "language": texts[steps[0]].language, "cells": cells})
    return groups


def run_view(run: Run, limits: Limits) -> dict[str, Any]:
    """One training stage, ready for the template."""
    title, chinese = facts.RUN_TITLES[run.name]
    rows = facts.plan_rows(run)
    return {
        "name": run.name,
        "title": title,
        "chinese": chinese,
        "rows": [(row, facts.signed_percent(row.difference)) for row in rows],
        "basis": facts.plan_basis(run.plan),
        "no_outcome": "" if run.outcome else "There is no outcome.json, so nothing is known of how it came out.",
        "parts": facts.time_parts(run.outcome),
        "facts": run_facts(run),
        "curves": bool(run.training or run.validation),
        "charts": loss_charts(run, limits),
        "small": small_charts(run, limits),
        "samples": sample_groups(run, limits),
    }


def run_facts(run: Run) -> Facts:
    """Sizes of the stage and the losses it ended with."""
    rows: list[tuple[str, str]] = []
    if plan := run.plan:
        rows += [
            ("Parameters", count(plan.parameters)),
            ("without the embedding", count(plan.parameters_without_embedding)),
            ("Steps", count(plan.steps)),
            ("Tokens per step", count(plan.tokens_per_step)),
            ("Passes over the data", shown(plan.epochs)),
            ("Arithmetic", shown(plan.flops, lambda n: f"{charts.power_label(n)} FLOP")),
        ]
    if outcome := run.outcome:
        rows += [
            ("Model FLOPs utilisation, causal (keys seen)", percent(outcome.mfu)),
            ("Model FLOPs utilisation, full square (PaLM)", percent(outcome.mfu_full_square)),
            ("Last training loss", shown(outcome.final_loss_nats_per_token, unit="nats per token")),
            ("Validation loss", shown(outcome.validation_loss_nats_per_token, unit="nats per token")),
            ("Validation", shown(outcome.validation_bits_per_byte, unit="bits per byte")),
        ]
    return known(rows)


def _bar(score: Score | None, name: str) -> Bar | None:
    if score is None:
        return None
    note = f"{name}: {score.right:,} of {score.asked:,} ({facts.interval_words(score)})"
    return Bar(score.fraction, *score.interval, note=note)


def accuracy_charts(lines: list[Line], limits: Limits) -> list[tuple[str, Markup]]:
    """One bar chart per language, a group per kind and the language's total."""
    figures = []
    for language in dict.fromkeys(line.language for line in lines if line.language):
        chosen = [line for line in lines if line.language == language][: 2 * limits.items]
        groups = [
            Group(
                kind_name(line),
                [_bar(line.before, BEFORE_AFTER[0]), _bar(line.after, BEFORE_AFTER[1])],
                line.chance,
            )
            for line in chosen
        ]
        name = facts.language_name(language)
        chart = charts.fraction_bars(groups, BEFORE_AFTER, title=f"Right answers, {name}, against guessing")
        if chart:
            figures.append((clip(name, 40), chart))
    return figures


def kind_name(line: Line) -> str:
    """A kind of question as a word; the totals by their name."""
    return clip(line.kind.replace("_", " "), 40) or "all kinds"


def _score_cells(score: Score | None) -> dict[str, str]:
    if score is None:
        return {"percent": NONE, "right": "", "interval": "", "verdict": ""}
    low, high = score.interval
    return {
        "percent": percent(score.fraction),
        "right": f"{score.right:,} / {score.asked:,}",
        "interval": f"{low * 100:.0f}–{percent(high)}",
        "verdict": score.verdict,
    }


def accuracy_view(evaluation: Evaluation | None, limits: Limits) -> dict[str, Any] | None:
    """The table and the bars of right answers; None without any answered question."""
    lines = accuracy_lines(evaluation.rows) if evaluation else []
    if not lines:
        return None
    shown_lines = lines if len(lines) <= 8 * limits.items else [*lines[: 8 * limits.items], lines[-1]]
    rows = [
        {
            "kind": kind_name(line),
            "language": clip(facts.language_name(line.language), 20),
            "chance": percent(line.chance),
            "before": _score_cells(line.before),
            "after": _score_cells(line.after),
            "total": not line.kind,
        }
        for line in shown_lines
    ]
    return {"rows": rows, "charts": accuracy_charts(lines, limits)}


def example_cells(example: Example, limits: Limits) -> dict[str, Any]:
    """One question with both replies and whether each is right."""
    length = limits.letters // 2
    return {
        "kind": clip(example.kind.replace("_", " "), 40),
        "language": example.language,
        "question": clip(example.question, length),
        "answer": clip(example.answer, length),
        "replies": [
            (name, clip(reply, length), facts.example_right(example, stage))
            for name, stage, reply in (("before", "pretrain", example.pretrain), ("after", "sft", example.sft))
        ],
    }


def examples_view(evaluation: Evaluation | None, limits: Limits) -> dict[str, Any]:
    """Examples apart by whether the last reply is right, and the stories."""
    examples = evaluation.examples if evaluation else ()
    right = [example for example in examples if example_right_now(example)]
    wrong = [example for example in examples if not example_right_now(example)]
    stories = evaluation.stories if evaluation else None
    return {
        "right": [example_cells(example, limits) for example in right[: limits.items]],
        "wrong": [example_cells(example, limits) for example in wrong[: limits.items]],
        "own_verdict": any(example.sft_right is None and example.pretrain_right is None for example in examples),
        "stories_sentence": facts.stories_sentence(stories),
        "stories": [
            {"prompt": clip(one.prompt, 300), "text": clip(one.text, limits.letters), "language": one.language}
            for one in (stories.examples if stories else ())[: limits.items]
        ],
    }


def example_right_now(example: Example) -> bool:
    """Whether the fine-tuned model (or, without it, the pretrained one) got it right."""
    return facts.example_right(example, "sft" if example.sft or example.sft_right is not None else "pretrain")


def data_facts(quick: Quickstart | None) -> Facts:
    """The text the model was made from."""
    data = quick.data if quick else None
    if data is None:
        return []
    return known(
        [
            ("Source", data.source),
            ("Documents", count(data.documents)),
            ("Size", shown(data.bytes, units.megabytes)),
            ("Training tokens", count(data.tokens)),
            ("Validation tokens", count(data.validation_tokens)),
            ("Bytes per token", shown(data.bytes_per_token)),
            ("Chinese characters", percent(data.han_fraction)),
        ]
    )


def tokenizer_facts(quick: Quickstart | None) -> Facts:
    """Every scalar fact about the tokenizer."""
    facts_ = quick.tokenizer if quick else {}
    rows = [
        (name.replace("_", " ").capitalize(), value if isinstance(value, str) else charts.figure(value))
        for name, value in facts_.items()
        if name != "vocabulary"
    ]
    size = facts_.get("vocabulary")
    first = [("Vocabulary", f"{count(size)} tokens")] if isinstance(size, float) else []
    return known([*first, *rows])[:16]


def machine_facts(record: Record) -> Facts:
    """Machine, versions and the hashes of the weights."""
    quick = record.quickstart
    rows: list[tuple[str, str]] = []
    if quick and (machine := quick.machine):
        rows += [
            ("Processor", machine.cpu),
            ("Cores", shown(machine.cores, str)),
            ("Threads used", shown(machine.threads, str)),
            ("Memory", shown(machine.memory_bytes, units.gibibytes)),
            ("Device", machine.device),
            ("Computed in", machine.compute_dtype),
        ]
    if quick:
        rows += [("penjing", quick.penjing), ("torch", quick.torch), ("Made", facts.date(quick.created))]
        rows += [("Command", quick.command)]
    for run in record.runs:
        sha = run.outcome.weights_sha256 if run.outcome else ""
        rows.append((f"{facts.RUN_TITLES[run.name][0]} weights, SHA-256", sha))
    return known(rows)


def export_sentences(quick: Quickstart | None) -> list[str]:
    """Whether the exported model is the trained one."""
    export = quick.export if quick else None
    if export is None:
        return ["The model was not exported."]
    where = f"The model was exported to {clip(export.path, 200)}." if export.path else "The model was exported."
    limit = shown(export.largest_logit_difference)
    difference = f" (largest difference of a logit: {limit})" if limit != NONE else ""
    checked = {
        True: f"Read back, it gives the same answers as the trained one{difference}.",
        False: f"Read back, it does not give the same answers as the trained one{difference}.",
        None: "It was not compared with the trained one.",
    }[export.verified]
    return [sentence for sentence in (where, checked, clip(export.note, 300)) if sentence]


def context(record: Record, limits: Limits) -> Mapping[str, Any]:
    """Everything the template shows, already in words."""
    quick, evaluation, data = record.quickstart, record.evaluation, record.quickstart and record.quickstart.data
    compression = record.compression
    return {
        "title": clip(quick.title, 160) if quick and quick.title else "A small language model",
        "created": facts.date(quick.created) if quick else "",
        "headline": [clip(sentence, 500) for sentence in facts.headline(record)],
        "problems": [clip(problem, 300) for problem in record.problems[: limits.items]],
        "stages": stage_rows(quick, limits),
        "runs": [run_view(run, limits) for run in record.runs],
        "accuracy": accuracy_view(evaluation, limits),
        "examples": examples_view(evaluation, limits),
        "data": data_facts(quick),
        "warnings": [clip(warning, 300) for warning in (data.warnings if data else ())[: limits.items]],
        "tokenizer": tokenizer_facts(quick),
        "compression": facts.compression_sentence(compression),
        "compression_note": clip(compression.note, 400) if compression else "",
        "machine": machine_facts(record),
        "export": export_sentences(quick),
        "next": clip(quick.next, 300) if quick else "",
        "folder": clip(record.folder, 200),
    }


def environment() -> Environment:
    """The template environment: escaping always on, an unknown name is a bug."""
    loader = PackageLoader("penjing.report", package_path="")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(record: Record) -> str:
    """The page as text, showing less of a long run until it is below `LARGEST_PAGE_BYTES`."""
    template = environment().get_template("page.html.jinja")
    page = ""
    for limits in LIMITS:
        page = template.render(context(record, limits))
        if len(page.encode("utf-8")) < LARGEST_PAGE_BYTES:
            break
    return page


def write_report(folder: Path) -> Path:
    """Read what a quickstart run left under `folder` and write `folder/report.html`; returns its path.

    Every part is optional. Raises `UserError` when `folder` is not there or cannot be written.
    """
    path = Path(folder) / FILE_NAME
    write_text(path, render(read_record(Path(folder))))
    return path
