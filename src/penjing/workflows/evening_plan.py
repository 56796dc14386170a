"""The plan of `penjing evening`: from a budget to a model size, tokens, time, price, bytes and files of each stage.

Times, memory and loss are those of `penjing plan` (planner/report.py); here is only what a pipeline adds: how stages
share the time, which size the budget is best spent on, and what lies on the disk at the end.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penjing.base import formatting as units
from penjing.base.config import parse_overrides
from penjing.base.errors import UserError
from penjing.base.markup import escape_markup, print_table
from penjing.data import formats as records
from penjing.data.catalog import registry as catalogue
from penjing.data.dataset_stats import STATS
from penjing.plan import compute_optimal, cost, little_data
from penjing.planner.inputs import PlanOptions, lengths_of
from penjing.planner.report import PlanReport, make_report
from penjing.train.config import Run
from penjing.train.resolve import step_rows, with_settings
from penjing.workflows.quickstart import settings_for
from penjing.workflows.train import resolve_run

STAGES = {"pretrain": "documents", "sft": "chats", "dpo": "preferences", "grpo": "prompts"}  # kinds of their records
TIME_SHARES = {"pretrain": 0.7, "sft": 0.2, "dpo": 0.1, "grpo": 0.1}  # of the time that is left for training
MAX_EPOCHS = {"pretrain": 4.0, "sft": 2.0, "dpo": 1.0, "grpo": 1.0}  # more are worth little, or are forgotten
SIZES = ("ladder-1m", "ladder-3m", "ladder-10m", "26m", "64m", "104m", "ladder-300m", "ladder-1b")
ENOUGH_NATS = 0.02  # the smallest size whose expected loss is so near the best is taken: it answers faster
REHEARSAL_SHARE = 1 / 1000  # of the tokens
MIN_STEPS = 20
UNIT_TOKENS = {"chats": 280, "preferences": 800, "prompts": 200}  # of one that has not been read: an estimate
SECONDS_BETWEEN_CHECKPOINTS, EVALUATIONS = 600, 10
FITTINGS = 5  # tries to end within the time: a training has whole steps, and at least MIN_STEPS
MORE_TIME = "Give more --hours or --price, or a smaller --size."
FIGURES = ("tokens", "seconds", "num_bytes", "files")
HELD_OUT_BYTES = 2e6  # of the texts: for the held-out loss, and to compress
# Bytes per second, estimates: of a download, of cleaning and of encoding by one process (docs/data.md).
DOWNLOAD_RATE, CLEAN_RATE, ENCODE_RATE = 10e6, 8e6, 30e6
END_SECONDS, END_BYTES, END_FILES = {"evaluate": 60.0, "export": 20.0}, 150_000, 4
EXPORT_FILES, CHECKPOINT_FILES = 8, 5
# Of a run's folder without checkpoints: settings, plan, metrics, outcome, tokenizer, samples, tokens.
RUN_FILES = {"pretrain": 18, "sft": 20, "dpo": 27, "grpo": 17}
TOKENIZER_BYTES = 32  # of one id in tokenizer.json
TOKEN_BYTES = {"documents": 2.1, "chats": 3.1, "preferences": 3.2, "prompts": 2.2}  # of one token with its indexes


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much data of one kind there is: estimates, but for files that have been read."""

    tokens: int = 0
    records: int = 0  # pairs, prompts
    num_bytes: int = 0  # of the texts
    download_bytes: int = 0
    files: int = 0  # that are fetched

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """What a stage takes. settings: what the plan decided for its training."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    files: int = 0
    memory_bytes: int = 0
    loss: float | None = None  # nats per token; None: unknown
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EveningPlan:
    """The stages in their order."""

    size: str  # a preset
    parameters: int
    device: str
    hour: str  # price of one; empty: unknown
    stages: tuple[PlannedStage, ...]
    notes: tuple[str, ...] = ()

    def total(self, figure: str) -> float:
        return float(sum(getattr(stage, figure) for stage in self.stages))

    def cost(self, seconds: float) -> str:
        return str(cost.cost(cost.price_of("", self.hour), seconds, 1)) if self.hour else ""  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "EveningPlan":
        stages = tuple(PlannedStage(**stage) for stage in facts["stages"])
        return cls(**{**facts, "stages": stages, "notes": tuple(facts["notes"])})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What decides size and tokens. seconds: of all stages. gpu: empty for this machine."""

    seconds: float
    size: str = ""  # a preset; empty: the best for the time
    gpu: str = ""
    price: str = ""  # of the device for an hour
    share: float = 1.0  # of the tokens that are trained on
    settings: Sequence[str] = ()
    cleans: bool = False  # whether the texts are cleaned

    @property
    def encode_rate(self) -> float:
        return CLEAN_RATE if self.cleans else ENCODE_RATE


def measure(names: Sequence[str], files: Mapping[str, Sequence[str]]) -> dict[str, Amount]:
    """The data by kind: by the catalogue's figures for `names`, by reading `files`, a list for each kind."""
    found: dict[str, Amount] = {}
    for entry in (catalogue.CATALOGUE[name] for name in names):
        size, counted = entry.source.num_bytes, entry.num_tokens // UNIT_TOKENS.get(entry.kind, 1)
        sizes = {"num_bytes": size, "download_bytes": size, "files": 2}
        found[entry.kind] = found.get(entry.kind, Amount()) + Amount(tokens=entry.num_tokens, records=counted, **sizes)
    for kind, paths in files.items():
        if paths:
            read = records.READERS[kind](list(map(Path, paths)), bad_records=records.UncheckedRecords())  # type: ignore[index]
            stats = STATS[kind]().count(read)  # type: ignore[index]
            read_all = Amount(tokens=stats.estimated_tokens, records=stats.num_records, num_bytes=stats.num_bytes)
            found[kind] = found.get(kind, Amount()) + read_all
    return found


def overrides(settings: Sequence[str], stage: str) -> dict[str, Any]:
    """The command line's settings for one stage."""
    return parse_overrides(settings_for(stage, settings, tuple(STAGES)[1:]))


def _run_of(stage: str, size: str, settings: Mapping[str, Any], budget: Budget) -> Run:
    """The run of a stage; each one trains the model of the pretraining."""
    model = {"preset": size, **overrides(budget.settings, "pretrain").get("model", {})}
    return resolve_run(stage, {"model": model, **settings}, overrides(budget.settings, stage))


def stage_settings(stage: str, size: str, tokens: float, amount: Amount, budget: Budget) -> dict[str, Any]:
    """Batch, steps and intervals for about so many tokens. The batch is the recipe's, smaller for few tokens."""
    run = _run_of(stage, size, {}, budget)
    units_wanted = max(2.0 * MIN_STEPS, tokens / unit_tokens(run, amount))
    rows = step_rows(
        run.batch.size, round(units_wanted), steps_of_batch_1=units_wanted, min_steps=MIN_STEPS, multiple=2
    )
    settings: dict[str, Any] = {"max_steps": round(units_wanted / rows), "batch": {"size": rows}}
    # One pass cannot overfit: the last checkpoint is the best one.
    settings["checkpoint"] = {"best": tokens > amount.tokens}
    if run.data.format == "documents":
        settings["data"] = {"val_fraction": min(0.05, HELD_OUT_BYTES / max(1, amount.num_bytes))}
        if run.optimizer.name == "muon" and settings["max_steps"] <= little_data.SHORT_RUN_STEPS:
            settings["optimizer"] = {"momentum": little_data.SHORT_RUN_MOMENTUM}
    return settings


def with_intervals(settings: dict[str, Any], step_seconds: float) -> dict[str, Any]:
    """The settings with checkpoints ten minutes apart, four at least, and about ten validations."""
    steps, between = settings["max_steps"], round(SECONDS_BETWEEN_CHECKPOINTS / step_seconds)
    intervals = {"checkpoint": min(steps // 4, between), "eval": steps // EVALUATIONS, "sample": steps // 4}
    groups = {name: {**settings.get(name, {}), "every": max(1, every)} for name, every in intervals.items()}
    return {**settings, **groups}


def unit_tokens(run: Run, amount: Amount) -> float:
    """Tokens of a row, a pair or a prompt with its answers."""
    if run.data.format == "preferences":
        return min(run.data.seq_len, amount.tokens / max(1, amount.records))
    return lengths_of(run).tokens * _filled(run.data.format, run.data.seq_len, amount)


def _filled(kind: str, seq_len: int, amount: Amount) -> float:
    """The part of packed rows that is no padding. Conversations are not cut: of rows of 256 and 512 tokens a tenth of a
    mean conversation stayed empty."""
    mean = amount.tokens / amount.records if kind == "chats" and amount.records else 0.0
    return max(0.5, 1 - mean / (10 * seq_len))


def report_of(stage: str, size: str, settings: Mapping[str, Any], amount: Amount, budget: Budget) -> PlanReport:
    """The page of `penjing plan` for the stage, its memory by formula. A pair has its mean length."""
    run = _run_of(stage, size, settings, budget)
    if run.data.format == "preferences":
        run = with_settings(run, {"data.seq_len": max(8, math.ceil(unit_tokens(run, amount)))})
    options = PlanOptions(
        gpu=budget.gpu, price=budget.price, unique=str(amount.tokens) if run.data.format == "documents" else ""
    )
    return make_report(stage, run, options, trace=False)


def _settled(stage: str, size: str, tokens: float, amount: Amount, budget: Budget) -> tuple[dict[str, Any], PlanReport]:
    """The settings for about so many tokens, and their report."""
    settings = stage_settings(stage, size, tokens, amount, budget)
    settings = with_intervals(settings, report_of(stage, size, settings, amount, budget).step_seconds)
    return settings, report_of(stage, size, settings, amount, budget)


def _longest(stage: str, size: str, seconds: float, amount: Amount, budget: Budget) -> tuple[float, PlanReport]:
    """Tokens of the stage that so many seconds allow, at most MAX_EPOCHS; and the report of about so many."""
    most = MAX_EPOCHS[stage] * (amount.tokens if stage != "grpo" else math.inf)
    tokens = min(most, 1e9)
    for _ in range(2):  # the first time for about a thousand million
        settings, report = _settled(stage, size, max(1.0, tokens), amount, budget)
        learned = report.tokens * _filled(STAGES[stage], report.seq_len, amount)
        if stage == "grpo":
            most = amount.records * report.tokens / (report.steps * report.rows_per_step)
        if settings["max_steps"] != report.steps:  # the command line's
            most = min(most, learned)
        other = amount.num_bytes / budget.encode_rate + report.predicted_seconds - report.parts_seconds["training"]
        tokens = min(most, max(0.0, seconds - other) * learned / report.parts_seconds["training"])
    return tokens, report


def make_plan(
    amounts: Mapping[str, Amount],
    budget: Budget,
    here: Budget | None = None,
    amounts_here: Mapping[str, Amount] | None = None,
) -> EveningPlan:
    """The plan for the data that there are. here, amounts_here: the device and the data of a rehearsal of that plan.

    Raises UserError for a budget or a device that is too small.
    """
    names = _stages_of(amounts)
    free = budget.seconds - _data_seconds(amounts, budget) - sum(END_SECONDS.values())
    shares = {name: TIME_SHARES[name] / sum(TIME_SHARES[each] for each in names) for name in names}
    size = budget.size or _best_size(amounts, free * shares["pretrain"], budget)
    given = free
    for _ in range(FITTINGS):
        times = {name: given * share for name, share in shares.items()}
        tokens, seconds = _tokens_within(times, size, amounts, budget)
        if seconds <= free:
            break
        given *= 0.999 * free / seconds
    else:
        got, least = units.duration(budget.seconds), units.duration(budget.seconds - free + seconds)
        raise UserError("not enough time", where="--hours", got=got, wanted=f"about {least}", next_step=MORE_TIME)
    device, data = here or budget, amounts_here or amounts
    fetched, files = (sum(getattr(amount, name) for amount in data.values()) for name in ("download_bytes", "files"))
    stages = [PlannedStage(name="data", seconds=_data_seconds(data, device), num_bytes=fetched, files=files)]
    trained = ((name, data[STAGES[name]]) for name in names if STAGES[name] in data)
    stages += [_training(name, size, device.share * tokens[name], amount, device) for name, amount in trained]
    report = report_of("pretrain", size, stages[1].settings, data["documents"], device)
    stages.append(PlannedStage(name="evaluate", seconds=END_SECONDS["evaluate"], num_bytes=END_BYTES, files=END_FILES))
    exported = 4 * report.parameters + END_BYTES // 4
    stages.append(PlannedStage(name="export", seconds=END_SECONDS["export"], num_bytes=exported, files=EXPORT_FILES))
    notes = [f"{report.device}: {report.source}", *report.warnings]
    price = cost.price_of(report.device, device.price)
    return EveningPlan(
        size=size,
        parameters=report.parameters,
        device=report.device,
        hour=f"{price.hour.amount} {price.hour.currency}" if price else "",
        stages=tuple(stages),
        notes=tuple(notes),
    )


def _tokens_within(
    times: Mapping[str, float], size: str, amounts: Mapping[str, Amount], budget: Budget
) -> tuple[dict[str, float], float]:
    """Tokens of each training for its part of the time, and the seconds that all of them then take."""
    tokens, seconds = {}, 0.0
    for name, time in times.items():
        amount = amounts[STAGES[name]]
        tokens[name], _ = _longest(name, size, time, amount, budget)
        if not tokens[name]:
            got = f"{units.duration(budget.seconds)}, of which {name} has {units.duration(max(0, time))}"
            raise UserError("not enough time", where="--hours", got=got, next_step=MORE_TIME)
        seconds += _training(name, size, tokens[name], amount, budget).seconds
    return tokens, seconds


def _stages_of(amounts: Mapping[str, Amount]) -> list[str]:
    """The trainings that have data: of pairs and prompts the pairs, which cost less."""
    names = [name for name, kind in STAGES.items() if kind in amounts]
    return [name for name in names if name != "grpo" or "dpo" not in names]


def _data_seconds(amounts: Mapping[str, Amount], budget: Budget) -> float:
    download = sum(amount.download_bytes for amount in amounts.values()) / DOWNLOAD_RATE
    return download + sum(amount.num_bytes for amount in amounts.values()) / budget.encode_rate


def _best_size(amounts: Mapping[str, Amount], seconds: float, budget: Budget) -> str:
    """The smallest size with about the least loss after so many seconds, by the law of compute_optimal.py. One that
    would memorize the texts is left out: the law was fitted to fresh ones."""
    documents, losses = amounts["documents"], dict[str, float]()
    for size in SIZES:
        tokens, report = _longest("pretrain", size, seconds, documents, budget)
        memorizes = report.parameters > little_data.PARAMETERS_PER_BYTE * documents.num_bytes
        if report.fits is not False and tokens and not (memorizes and losses):
            worth = compute_optimal.repeated_tokens(documents.tokens, tokens / documents.tokens)
            losses[size] = compute_optimal.LAWS["corrected"].loss(report.parameters, worth)
    near = [size for size, loss in losses.items() if loss <= min(losses.values()) + ENOUGH_NATS]
    return near[0] if near else SIZES[0]


def _training(name: str, size: str, tokens: float, amount: Amount, budget: Budget) -> PlannedStage:
    """A training on about so many tokens, with the time to encode its data."""
    settings, report = _settled(name, size, tokens, amount, budget)
    if report.fits is False:
        what, where = f"{name} does not fit the memory of {report.device}", f"--size {size.removeprefix('ladder-')}"
        got, wanted = units.gibibytes(report.peak_memory_bytes), f"at most {units.gibibytes(report.memory_bytes)}"
        raise UserError(what, where=where, got=got, wanted=wanted, next_step="Give a smaller --size.")
    vocabulary = _run_of(name, size, {}, budget).model.vocab_size
    kept = min(2, math.ceil(report.steps / settings["checkpoint"]["every"]))
    return PlannedStage(
        name=name,
        tokens=round(report.tokens * _filled(STAGES[name], report.seq_len, amount)),
        seconds=report.predicted_seconds + amount.num_bytes / budget.encode_rate,
        num_bytes=kept * report.disk_checkpoint_bytes
        + round(TOKEN_BYTES[STAGES[name]] * amount.tokens)
        + TOKENIZER_BYTES * vocabulary,
        files=kept * CHECKPOINT_FILES + RUN_FILES[name],
        memory_bytes=report.peak_memory_bytes,
        loss=report.expected_loss,
        settings=settings,
    )


def check_disk(plan: EveningPlan, out: Path) -> None:
    """Raise UserError if the disk is too small for what is still to come; the folder's files count as there."""
    there = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    free, wanted = shutil.disk_usage(out).free, plan.total("num_bytes") - there
    if free < wanted:
        step = "Give another --out, or a smaller --size."
        got, needed = f"{units.gibibytes(free)} free", units.gibibytes(wanted)
        raise UserError("not enough disk space", where=out, got=got, wanted=needed, next_step=step)


HEADINGS = ("stage", "tokens>", "time>", "price>", "on disk>", "files>", "peak memory>", "loss at its end>")


def print_plan(plan: EveningPlan, console: Console) -> None:
    rows: list[tuple[object, ...]] = [
        (
            stage.name,
            units.count(stage.tokens) if stage.tokens else "",
            units.duration(stage.seconds),
            plan.cost(stage.seconds),
            units.megabytes(stage.num_bytes),
            stage.files or "",
            units.gibibytes(stage.memory_bytes) if stage.memory_bytes else "",
            f"{stage.loss:.2f}" if stage.loss else "",
        )
        for stage in plan.stages
    ]
    seconds = plan.total("seconds")
    total = ("all", units.count(plan.total("tokens")), units.duration(seconds), plan.cost(seconds))
    rows.append((*total, units.megabytes(plan.total("num_bytes")), f"{plan.total('files'):.0f}", "", ""))
    title = f"{plan.size.removeprefix('ladder-')}: {units.count(plan.parameters)} parameters on {plan.device}"
    print_table(console, HEADINGS, rows, title=title)
    for note in plan.notes:
        console.print(escape_markup("note", note), soft_wrap=True)


def print_comparison(plan: EveningPlan, actual: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """Predicted and actual, stage by stage, with the error of tokens, bytes and files together."""
    texts: tuple[Callable[[Any], str], ...] = (units.count, units.duration, units.megabytes, "{:.0f}".format)
    shown = dict(zip((*FIGURES, "memory_bytes"), (*texts, units.gibibytes), strict=True))

    def change(stage: PlannedStage, figure: str) -> str:
        was, now = (shown[figure](value) for value in (getattr(stage, figure), actual[stage.name][figure]))
        trains = stage.name in STAGES or figure not in ("tokens", "memory_bytes")
        return f"{was} → {now}" if trains else ""

    rows = [(stage.name, *(change(stage, figure) for figure in shown)) for stage in plan.stages]
    rows.append(("error of the sum", *(f"{error:+.1%}" for error in errors_of(plan, actual).values()), ""))
    headings = ("stage", "tokens>", "time>", "on disk>", "files>", "peak memory>")
    print_table(console, headings, rows, title="predicted → actual")


def errors_of(plan: EveningPlan, actual: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """(predicted - actual) / actual of the sums over all stages."""
    sums = {figure: sum(found[figure] for found in actual.values()) for figure in FIGURES}
    return {figure: plan.total(figure) / sums[figure] - 1 if sums[figure] else 0.0 for figure in FIGURES}
