"""Sentences and rows made from a record: what the page and the terminal say in the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from penjing.base import formatting as units
from penjing.report.accuracy import Score, accuracy_lines
from penjing.report.charts import figure
from penjing.report.load_run import Compression, Evaluation, Example, Outcome, Plan, Record, Run, Stage, Stories

NONE = "—"
LANGUAGES = {"en": "English", "zh": "中文"}
RUN_TITLES = {"pretrain": ("Pretraining", "预训练"), "sft": ("Fine-tuning", "指令微调")}
STAGE_TITLES = {
    "data": "数据",
    "tokenizer": "分词器",
    "shards": "编码分片",
    "plan": "预测",
    "pretrain": "预训练",
    "sft": "指令微调",
    "evaluate": "评测",
    "export": "导出",
    "report": "报告",
}
_END_MARKS = " \t\n.。!！?？\"'“”"


def clip(text: str, length: int) -> str:
    """`text` cut to `length` characters, with an ellipsis where something was left out."""
    return text if len(text) <= length else text[:length].rstrip() + "…"


def percent(fraction: float | None) -> str:
    """0.634 -> '63 %' (with a no-break space)."""
    return NONE if fraction is None else f"{fraction * 100:.0f}\u00a0%"


def signed_percent(fraction: float | None) -> str:
    """0.021 -> '+2.1 %'."""
    if fraction is None:
        return NONE
    digits = 1 if abs(fraction) < 0.1 else 0
    shown = f"{abs(fraction) * 100:,.{digits}f}"
    sign = "" if not float(shown.replace(",", "")) else "+" if fraction > 0 else "−"
    return f"{sign}{shown}\u00a0%"


def count(number: float | None) -> str:
    """A count with its separators below 100,000, in k, M or B above."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if abs(number) < 100_000 else units.count(float(number))


def shown(number: float | None, form: Callable[[float], str] = figure, unit: str = "") -> str:
    """`number` through `form` with its unit, or a dash."""
    return NONE if number is None else form(number) + (f"\u00a0{unit}" if unit else "")


def duration(seconds: float | None) -> str:
    """Seconds as people say them; a negative time (a clock set back) is shown as a dash."""
    return NONE if seconds is None or seconds < 0 else units.duration(seconds)


def language_name(language: str) -> str:
    return LANGUAGES.get(language, language or "all")


def date(created: str) -> str:
    """An ISO time as '2025-03-01 14:05 UTC', anything else as it is."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return clip(created, 60)
    return f"{moment:%Y-%m-%d %H:%M %Z}".strip()


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One figure, as predicted and as it came out. `difference` is (actual - predicted) / predicted."""

    name: str
    predicted: str
    actual: str
    difference: float | None
    remark: str = ""


def _plan_row(
    name: str, predicted: float | None, actual: float | None, form: Callable[[float], str], remark: str = ""
) -> PlanRow:
    comparable = predicted is not None and actual is not None and predicted > 0
    difference = actual / predicted - 1 if comparable and predicted and actual is not None else None
    return PlanRow(
        name=name,
        predicted=shown(predicted, form),
        actual=shown(actual, form),
        difference=difference,
        remark=remark,
    )


def _range_remark(plan: Plan | None, outcome: Outcome | None) -> str:
    """The predicted range of times, and whether the real one fell inside."""
    if plan is None or plan.predicted_seconds_low is None or plan.predicted_seconds_high is None:
        return ""
    low, high = plan.predicted_seconds_low, plan.predicted_seconds_high
    remark = f"The time was predicted to lie between {duration(low)} and {duration(high)}"
    if outcome is None or outcome.seconds is None:
        return remark + "."
    return remark + (", and it does." if low <= outcome.seconds <= high else ", and it does not.")


def plan_rows(run: Run) -> list[PlanRow]:
    """Predicted against actual, for the figures that either side knows."""
    plan, outcome = run.plan, run.outcome

    def both(before: str, after: str) -> tuple[float | None, float | None]:
        return getattr(plan, before, None), getattr(outcome, after, None)

    rows = [
        _plan_row("Time", *both("predicted_seconds", "seconds"), duration, _range_remark(plan, outcome)),
        _plan_row("Speed", *both("tokens_per_second", "tokens_per_second"), lambda n: f"{count(n)} tokens/s"),
        _plan_row("Tokens trained on", *both("tokens", "tokens"), count),
        _plan_row("Peak memory", *both("predicted_peak_memory_bytes", "peak_memory_bytes"), units.gibibytes),
    ]
    return [row for row in rows if (row.predicted, row.actual) != (NONE, NONE)]


def plan_basis(plan: Plan | None) -> str:
    """How far the prediction can be trusted."""
    if plan is None:
        return "There is no plan.json, so nothing is known of what was predicted."
    if plan.level in ("probe", "L2"):
        return "The prediction rests on a short probe on this machine before the stage began."
    return "The prediction is an estimate from a formula: nothing was measured on this machine before."


def time_parts(outcome: Outcome | None) -> str:
    """Where the time of a stage went."""
    if outcome is None:
        return ""
    parts = [
        ("training", outcome.training_seconds),
        ("validation", outcome.validation_seconds),
        ("checkpoints", outcome.checkpoint_seconds),
        ("other work", outcome.other_seconds),
    ]
    known = [f"{duration(seconds)} {name}" for name, seconds in parts if seconds is not None]
    sentence = f"The time went into {', '.join(known)}." if known else ""
    if outcome.resumed:
        times = "once" if outcome.resumed == 1 else f"{outcome.resumed} times"
        sentence += f" The stage was interrupted and taken up again {times}."
    return sentence.strip()


def total_seconds(stages: Sequence[Stage]) -> float | None:
    """The time of all stages together; None when none is known."""
    known = [stage.seconds for stage in stages if stage.seconds is not None and stage.seconds >= 0]
    return sum(known) if known else None


def _made(record: Record) -> str:
    """What was made, from what, how long and on what."""
    if not any(run.outcome for run in record.runs):
        return "No stage has finished training in this folder."
    quick, base = record.quickstart, record.run("pretrain") or record.run("sft")
    size = base.plan.parameters if base and base.plan else None
    sentence = f"A language model{f' of {count(size)} parameters' if size else ''} was trained from nothing"
    tokens = base.outcome.tokens if base and base.outcome else None
    if tokens:
        sentence += f" on {count(tokens)} tokens"
    if quick and quick.data and quick.data.source:
        sentence += f" of {clip(quick.data.source, 120)}"
    seconds = total_seconds(quick.stages) if quick else None
    if seconds:
        sentence += f", in {duration(seconds)}"
    if quick and quick.machine:
        on = quick.machine.cpu if quick.machine.device in ("cpu", "") else quick.machine.device
        sentence += f" on {clip(on, 80)}" if on else ""
    return sentence + "."


def interval_words(score: Score) -> str:
    low, high = score.interval
    return f"95\u00a0% interval {percent(low)} to {percent(high)}"


def _answers(evaluation: Evaluation | None) -> str:
    """How well it answers, over all questions."""
    lines = accuracy_lines(evaluation.rows) if evaluation else []
    score = lines[-1].best if lines else None
    if score is None:
        return "How well it answers was not measured."
    line = lines[-1]
    tuned = "After fine-tuning it" if line.after else "Without fine-tuning it"
    sentence = f"{tuned} answers {percent(score.fraction)} of {score.asked:,} questions right ({interval_words(score)})"
    if score.chance is not None:
        sentence += f"; guessing would get {percent(score.chance)}"
    if line.after and line.before:
        sentence += f", and before fine-tuning it got {percent(line.before.fraction)}"
    return sentence + "."


def _unseen(record: Record) -> str:
    """How well it predicts text it has not seen, from the pretraining outcome."""
    run = record.run("pretrain")
    bits = run.outcome.validation_bits_per_byte if run and run.outcome else None
    if bits is None:
        return ""
    return f"Predicting text it had not seen, it needs {figure(bits)} bits per byte (8 would be no knowledge at all)."


def headline(record: Record) -> list[str]:
    """The whole run in two to four plain sentences; a failed stage is said first."""
    stages = record.quickstart.stages if record.quickstart else ()
    failed = [f"The stage {clip(stage.name, 40)} failed." for stage in stages if stage.state == "failed"]
    return [sentence for sentence in (*failed, _made(record), _answers(record.evaluation), _unseen(record)) if sentence]


def compression_sentence(compression: Compression | None) -> str:
    """Who packs the unseen text smaller, the model or zstd, and by how much."""
    if compression is None:
        return "There is no comparison with a compressor (it is made for runs on real text only)."
    model, zstd = compression.model_bits_per_byte, compression.zstd_19_bits_per_byte
    if model is None or zstd is None or model <= 0 or zstd <= 0:
        return "The comparison with a compressor lacks one of its two figures."
    size = f" ({units.megabytes(compression.validation_bytes)})" if compression.validation_bytes else ""
    sentence = f"On the unseen text{size} the model needs {model:.3f} bits per byte and zstd -19 needs {zstd:.3f}: "
    if abs(model - zstd) < 0.0005:
        return sentence + "a draw."
    winner, fraction = ("the model", 1 - model / zstd) if model < zstd else ("zstd", 1 - zstd / model)
    return f"{sentence}{winner} wins with {fraction * 100:.1f}\u00a0% fewer bits."


def stories_sentence(stories: Stories | None) -> str:
    """How many stories used the words they were given."""
    if stories is None or not stories.asked or stories.with_required_words is None:
        return ""
    right = min(max(stories.with_required_words, 0), stories.asked)
    score = Score(asked=stories.asked, right=right, chance=None)
    return (
        f"Asked for {stories.asked:,} stories with given words, the model used every word in {right:,} of them "
        f"({percent(score.fraction)}, {interval_words(score)})."
    )


def same_answer(reply: str, answer: str) -> bool:
    """Whether a reply is the expected answer but for case, outer spaces and closing marks."""
    return bool(answer.strip()) and reply.strip(_END_MARKS).casefold() == answer.strip(_END_MARKS).casefold()


def example_right(example: Example, stage: str) -> bool:
    """The evaluation's own verdict where there is one, else `same_answer`."""
    reply = example.sft if stage == "sft" else example.pretrain
    verdict = example.sft_right if stage == "sft" else example.pretrain_right
    return same_answer(reply, example.answer) if verdict is None else verdict


def spread(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of `items`, evenly spread, with the first and the last."""
    if len(items) <= most or most < 2:
        return list(items[-most:])
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
