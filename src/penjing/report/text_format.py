"""Sentences and formatted figures of runs, shared by the page and the terminal."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from penjing.base import formatting as units
from penjing.base.accuracy import Score, Scores, accuracy_lines, change_lines
from penjing.base.untrusted import Fields
from penjing.devices import HOST_TYPE
from penjing.devices.host import PROCESSOR
from penjing.plan.device_model import LEVELS
from penjing.plan.prediction_history import Comparison, share_done
from penjing.report.charts import figure
from penjing.report.load_runs import Quickstart, ReportData, ReportedRun
from penjing.report.metrics import CHARTS, HELD_OUT, TOKENS, task_names

NONE = "—"
LANGUAGES = {"en": "English", "zh": "中文"}


def clip(text: str, length: int) -> str:
    """`text` truncated to `length` characters, with an ellipsis."""
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
    """A count, with thousands separators below 100,000, in k, M or B above."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if abs(number) < 100_000 else units.count(float(number))


def shown(number: float | None, form: Callable[[float], str]) -> str:
    """`number` through `form`, or a dash."""
    return NONE if number is None else form(number)


def duration(seconds: float | None) -> str:
    """A readable duration; a dash for a negative time (the clock was set back)."""
    return NONE if seconds is None or seconds < 0 else units.duration(seconds)


def language_name(language: str) -> str:
    return LANGUAGES.get(language, language or "all")


def kind_name(kind: str) -> str:
    """A readable kind of question; `all kinds` for a total."""
    return clip(kind.replace("_", " "), 40) or "all kinds"


def date(created: str) -> str:
    """An ISO time as '2025-03-01 14:05 UTC', anything else as it is."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return clip(created, 60)
    return f"{moment:%Y-%m-%d %H:%M %Z}".strip()


def spread(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of `items`, evenly spaced, including the first and the last."""
    if len(items) <= limit or limit < 2:
        return list(items[-limit:])
    return [items[round(index * (len(items) - 1) / (limit - 1))] for index in range(limit)]


# --- predicted and actual --------------------------------------------------------------------------------------------


class PlanRow(NamedTuple):
    """One figure, predicted and actual. `error`: as `penjing plan verify` has it."""

    name: str
    predicted: str
    actual: str
    error: float | None


GROW_WITH_STEPS = ("predicted_seconds", "tokens")  # of the plan; a run that ended early is compared with its share
PLAN_FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("Time", "predicted_seconds", "seconds", duration),
    ("Speed", "tokens_per_second", "tokens_per_second", lambda number: f"{count(number)} tokens/s"),
    ("Tokens trained on", "tokens", "tokens", count),
    ("Peak memory", "predicted_peak_memory_bytes", "peak_memory_bytes", units.gibibytes),
)


def plan_rows(run: ReportedRun) -> list[PlanRow]:
    """Predicted and actual, for figures of which at least one is known."""
    rows, share = [], share_done(run.plan.raw, run.done.raw)
    for name, before, after, form in PLAN_FIGURES:
        predicted, actual = run.plan.number(before), run.done.number(after)
        predicted = predicted * share if predicted and before in GROW_WITH_STEPS else predicted
        error = None if predicted is None or actual is None else Comparison(name, "", predicted, actual).error
        if predicted is not None or actual is not None:
            rows.append(PlanRow(name, shown(predicted, form), shown(actual, form), error))
    return rows


def plan_basis(run: ReportedRun) -> str:
    """The basis of the prediction, and whether the time is inside its interval."""
    plan, seconds, share = run.plan, run.done.number("seconds"), share_done(run.plan.raw, run.done.raw)
    if not plan:
        return "There is no plan.json, so nothing is known of what was predicted."
    level = plan.text("level")
    basis = f"rests on the {LEVELS[level]}" if level in LEVELS else "is of an older version"
    low, high = plan.number("predicted_seconds_low"), plan.number("predicted_seconds_high")
    if low is None or high is None:
        return f"The prediction {basis}."
    low, high, part = low * share, high * share, " for the steps that it made" if share < 1 else ""
    inside = "" if seconds is None else ", and it does" if low <= seconds <= high else ", and it does not"
    return f"The prediction {basis}; predicted to take between {duration(low)} and {duration(high)}{part}{inside}."


def time_parts(run: ReportedRun) -> str:
    names = {"training": "training", "validation": "validation", "checkpoint": "checkpoints", "other": "other work"}
    seconds = {name: run.done.number(f"{key}_seconds") for key, name in names.items()}
    known = [f"{duration(value)} {name}" for name, value in seconds.items() if value is not None]
    none = "" if run.done else "There is no outcome.json yet, so nothing is known of how it came out."
    return f"The time went into {', '.join(known)}." if known else none


# --- the run in sentences --------------------------------------------------------------------------------------------


def run_state(run: ReportedRun) -> str:
    """The task of a run, and its progress."""
    what = f"{run.name} ({task_names(run.task)[0].lower()})"
    steps = run.plan.number("steps")
    at = f"step {count(run.last_step)}" + (f" of {count(steps)}" if steps else "")
    if not run.outcome:
        if run.is_running:
            return f"{what} is running, at {at}."
        return f"{what} is not finished: it stopped at {at}. {run.ending(run.last_step).text('why')}".rstrip()
    tokens, seconds = run.outcome.number("tokens"), run.outcome.number("seconds")
    known = ((run.last_step, f"{count(run.last_step)} steps"), (tokens, f"{count(tokens)} tokens"))
    figures = ", ".join(shown for number, shown in known if number) or "no figures"
    state = "stopped early" if run.outcome.text("stopped_early") else "is finished"
    used = run.outcome.fields("delivered").text("why").replace("step", "Step", 1)
    return f"{what} {state}: {figures} in {duration(seconds)}." + f" {used}." * bool(used)


def held_out_changes(run: ReportedRun) -> str:
    """Up to three figures on held-out data, before the first step and after the last."""
    before, parts = run.outcome.fields("before"), []
    for chart in CHARTS:
        first, last = (source.number(HELD_OUT + chart.metric) for source in (before, run.outcome))
        if chart.best and first is not None and last is not None:
            form = percent if chart.percent else figure
            parts.append(f"{chart.title.lower()} {form(first)} → {form(last)}")
    return f"On held-out data: {', '.join(parts[:3])}." if parts else ""


def regression_sentence(questions: Scores) -> str:
    """The kinds of questions that got worse; empty if none were asked before and after."""
    if len({when for when, _, _ in questions}) < 2:
        return ""
    lost = [
        f"{kind_name(line.kind)} {line.before.correct} → {line.after.correct} of {line.after.total}"
        for line in change_lines(questions)
        if line.kind and line.is_regression
    ]
    return f"Lost: {', '.join(lost) or 'no kind of question'}."


def total_seconds(stages: Sequence[Fields]) -> float | None:
    """The total time of all stages; None if none is known."""
    known = [seconds for stage in stages if (seconds := stage.number("seconds")) is not None and seconds >= 0]
    return sum(known) if known else None


def _training_sentence(record: ReportData, facts: Fields) -> str:
    """The model of a quickstart: size, data, time and machine."""
    if not any(run.outcome for run in record.runs):
        return "No stage has finished training in this folder."
    base = record.runs[0]
    size, tokens = base.plan.number("parameters"), base.outcome.number(TOKENS)
    sentence = f"A language model{f' of {count(size)} parameters' if size else ''} was trained from nothing"
    sentence += f" on {count(tokens)} tokens" if tokens else ""
    source = facts.fields("data").text("source")
    sentence += f" of {clip(source, 120)}" if source else ""
    seconds = total_seconds(facts.items("stages"))
    sentence += f", in {duration(seconds)}" if seconds else ""
    machine = facts.fields("machine")
    device = machine.text("device")
    hardware = machine.text(PROCESSOR) if device in (HOST_TYPE, "") else device
    return sentence + (f" on {clip(hardware, 80)}." if hardware else ".")


def interval_text(score: Score) -> str:
    low, high = score.interval
    return f"95\u00a0% interval {percent(low)} to {percent(high)}"


def _accuracy_sentence(record: ReportData) -> str:
    """The accuracy of a quickstart's model over all questions."""
    lines = accuracy_lines(record.runs[-1].questions) if record.runs else []
    if not lines:
        return "How well it answers was not measured."
    line, score = lines[-1], lines[-1].best
    tuned = "After fine-tuning it" if line.after else "Without fine-tuning it"
    sentence = f"{tuned} answers {percent(score.fraction)} of {score.total:,} questions right ({interval_text(score)})"
    if score.chance is not None:
        sentence += f"; guessing would get {percent(score.chance)}"
    if line.after and line.before:
        sentence += f", and before fine-tuning it got {percent(line.before.fraction)}"
    return sentence + "."


def _held_out_sentence(record: ReportData) -> str:
    """Bits per byte on held-out text, from the pretraining's outcome."""
    bits = record.runs[0].outcome.number(HELD_OUT + "bits_per_byte") if record.runs else None
    if bits is None:
        return ""
    return f"Predicting text it had not seen, it needs {figure(bits)} bits per byte (8 would be no knowledge at all)."


def headline(record: ReportData) -> list[str]:
    """The report in a few sentences; failed stages come first."""
    if record.quickstart is None:
        if len(record.runs) > 1:
            open_runs = [run_state(run) for run in record.runs if not run.outcome]
            tasks = Counter(task_names(run.task)[0].lower() for run in record.runs)
            sizes = ", ".join(f"{number} of {task}" for task, number in tasks.items())
            return [f"Runs side by side: {sizes}.", *open_runs]
        run = record.runs[0]
        return [
            sentence
            for sentence in (run_state(run), held_out_changes(run), regression_sentence(run.questions))
            if sentence
        ]
    facts = record.quickstart.facts
    failed = [stage.text("name") for stage in facts.items("stages") if stage.text("state") == "failed"]
    lines = [f"The stage {clip(name, 40)} failed." for name in failed]
    sentences = (*lines, _training_sentence(record, facts), _accuracy_sentence(record), _held_out_sentence(record))
    return [sentence for sentence in sentences if sentence]


def stories_sentence(quickstart: Quickstart) -> str:
    """The number of stories that used all required words."""
    stories = quickstart.evaluation.fields("stories")
    asked, used = stories.number("asked"), stories.number("with_required_words")
    if not asked or asked < 1 or used is None:
        return ""
    score = Score(total=round(asked), correct=round(min(max(used, 0), asked)))
    return (
        f"Asked for {score.total:,} stories with given words, the model used every word in {score.correct:,} of them "
        f"({percent(score.fraction)}, {interval_text(score)})."
    )
