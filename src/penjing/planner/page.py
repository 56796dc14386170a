"""Print plans: the report of `penjing plan`, and the summary of `penjing train` before step 1."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from penjing import devices
from penjing.base import formatting as units
from penjing.base.config import Decision
from penjing.base.markup import escape_markup, print_table
from penjing.devices import host
from penjing.parallel.base import Strategy
from penjing.plan import cost
from penjing.plan.device_model import LEVELS
from penjing.plan.gpu_specs import match_gpu_spec
from penjing.plan.memory.device_target import MEMORY_MARGIN
from penjing.plan.rough_memory import ROUGH_MARGIN
from penjing.plan.run_estimate import RunEstimate
from penjing.planner.report import PlanReport
from penjing.planner.strategies import StrategyPlan, recommendation
from penjing.train.batch_geometry import batch_geometry
from penjing.train.build import PreparedRun
from penjing.train.precision import SLOW_FLOAT16

SHOWN_PARTS = 4
SHOWN_SOURCES = 8  # the largest; a folder of saved pages has hundreds
STYLES = {"note": "yellow", "over budget": "red"}


def print_page(page: PlanReport, console: Console, *, explain: bool = False) -> None:
    """Print the report: model, tokens, time, memory, cost, and advice."""
    title = f"{page.what} on {page.devices} x {page.device} ({page.source})"
    rows = [*_model(page), *_amount(page), *_time(page), *_memory(page), *_money(page)]
    print_table(console, (), [(f"  {name}", value) for name, value in rows], title=title)
    print_decisions(page.decisions, console)
    if page.strategies:
        print_strategies(page.strategies, page.devices, console)
    for heading, lines in (
        ("advice", page.advice),
        ("better", page.alternatives),
        ("note", page.warnings),
        ("over budget", page.over_budget),
    ):
        for line in lines:
            console.print(escape_markup(heading, line, style=STYLES.get(heading, "")), soft_wrap=True)
    if explain:
        console.print("  formulas:")
        for line in page.formulas:
            console.print(f"    {line}", soft_wrap=True, markup=False)


def print_decisions(decisions: Iterable[Decision], console: Console) -> None:
    """What the program decided: a line a setting."""
    rows = [(f"  {one.field}", *one.values, one.why) for one in decisions]
    if rows:
        print_table(console, ("  decided", "was", "now", "why"), rows)


def print_strategies(rows: Sequence[StrategyPlan], number: int, console: Console) -> None:
    """A line a strategy, and which one to take."""
    cells = []
    for row in rows:
        states = ", ".join(f"{name} {units.gibibytes(size)}" for name, size in list(row.waterfall.items())[:4])
        verdict = {True: "fits", False: "does not fit", None: "unknown"}[row.fits]
        times = (f"{row.step_seconds * 1e3:.4g} ms", f"{row.speedup:.2f} x")
        cells.append((f"  {row.strategy}", units.gibibytes(row.rank_bytes), verdict, row.micro_size, *times, states))
    headings = ("  strategy", "a device>", "memory", "micro-batch>", "step>", "speed-up>", "of which")
    print_table(console, headings, cells)
    console.print(escape_markup("best", recommendation(rows, number)), soft_wrap=True)


def _model(page: PlanReport) -> list[tuple[str, str]]:
    active = f", {page.active_parameters:,} active" if page.active_parameters != page.parameters else ""
    parts = ", ".join(f"{name} {units.count(count)}" for name, count in page.components.items())
    return [
        ("parameters", f"{page.parameters:,}{active}" + (f" ({parts})" if parts else "")),
        (
            "FLOPs per token",
            f"{page.flops_per_token:.3e} causal (keys seen), {page.flops_per_token_full_square:.3e} full square (PaLM)",
        ),
    ]


def _amount(page: PlanReport) -> list[tuple[str, str]]:
    unique = f", {page.epochs:.2f} epochs of {units.count(page.unique_tokens)}" if page.unique_tokens else ""
    total = page.flops_per_token * page.tokens
    batch = f"{page.rows_per_step} x {page.tokens_per_step / page.rows_per_step:g} = {page.tokens_per_step:,} tokens"
    passes = f"per device micro-batches of {page.micro_size}, accumulation {page.passes}"
    return [
        ("tokens", f"{units.count(page.tokens)} ({page.tokens_reason}{unique})"),
        ("compute", f"{total:.2e} FLOPs (causal) in {page.dtype}"),
        ("batch", f"{batch}; {passes}"),
        ("steps", f"{page.steps:,}"),
    ]


def _duration(plan: PlanReport | RunEstimate) -> str:
    """The time with its interval and level."""
    low, high = units.duration(plan.predicted_seconds_low), units.duration(plan.predicted_seconds_high)
    return f"{units.duration(plan.predicted_seconds)} ({low} to {high}; {plan.level}, {LEVELS[plan.level]})"


def _speed(plan: PlanReport | RunEstimate) -> str:
    return f"{units.count(float(f'{plan.tokens_per_second:.3g}'))} tokens/s"


def _other_parts(plan: PlanReport | RunEstimate, above: float = 0.0) -> str:
    """Time outside training by part, for parts of more than `above` seconds."""
    parts = [(name, seconds) for name, seconds in plan.parts_seconds.items() if name != "training" and seconds > above]
    return ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in parts)


def _time(page: PlanReport) -> list[tuple[str, str]]:
    parts = sorted(page.step_parts_seconds.items(), key=lambda pair: -pair[1])[:SHOWN_PARTS]
    total = sum(page.step_parts_seconds.values())
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts if seconds > 0)
    rates = _speed(page)
    if page.mfu_causal is not None and page.mfu_full_square is not None:
        rates += f", MFU {page.mfu_causal:.0%} causal, {page.mfu_full_square:.0%} full square"
    return [
        ("time", _duration(page)),
        ("step", f"{page.step_seconds * 1e3:.4g} ms, {rates} ({page.level})"),
        ("breakdown", f"{shares}; outside training: {_other_parts(page)}"),
        ("bottleneck", page.bottleneck.replace("_", " ")),
    ]


def verdict_of(fits: bool | None, tight: bool) -> Text:
    """Text: whether the plan fits in memory."""
    if tight:
        return Text.assemble(("tight", "yellow"), f", within the {MEMORY_MARGIN:.1%} error of this figure")
    if fits is None:
        return Text("the device's memory is unknown")
    return Text("fits") if fits else Text("does not fit", style="red")


def _memory(page: PlanReport) -> list[tuple[str, str | Text]]:
    of_memory = f" of {units.gibibytes(page.memory_bytes)}" if page.memory_bytes else ""
    spare = page.memory_bytes - page.peak_memory_bytes
    remaining = f", {units.gibibytes(spare)} to spare" if page.fits and page.memory_bytes else ""
    method = "traced" if page.traced else f"formula, +-{100 * ROUGH_MARGIN:g} %"
    parts = sorted(page.waterfall.items(), key=lambda pair: -pair[1])[:6]
    peak = Text.assemble(
        f"{units.gibibytes(page.peak_memory_bytes)}{of_memory}: ",
        verdict_of(page.fits, page.tight),
        f"{remaining} ({method}; a device)",
    )
    lines: list[tuple[str, str | Text]] = [("peak memory", peak)]
    if parts:
        lines.append(("consists of", ", ".join(f"{name} {units.gibibytes(size)}" for name, size in parts)))
    if page.largest_micro_size:
        lines.append(("largest micro-batch", f"about {page.largest_micro_size} rows (batch.micro_size)"))
    data, saved = units.gibibytes(page.disk_data_bytes), units.gibibytes(page.disk_checkpoint_bytes)
    lines.append(("disk", f"{data} of tokens, {saved} a checkpoint"))
    return lines


def _money(page: PlanReport) -> list[tuple[str, str]]:
    money = f"{page.cost} at {page.price}" if page.cost else "unknown: give --price, such as --price 2USD"
    return [("cost", money), ("energy", f"{page.kilowatt_hours:.2g} kWh (estimate)")]


def print_plan(prepared: PreparedRun, console: Console, further: Sequence[tuple[str, str]] = ()) -> None:
    """Print the run before step 1, in the terms of other trainers."""
    run, estimate, size, strategy = prepared.run, prepared.estimate, prepared.size, prepared.context.strategy
    if run.compute.dtype == "float16" and devices.of(strategy.device).is_host:
        console.print(escape_markup("warning", f"{SLOW_FLOAT16}; use compute.dtype=auto"))
    unit = f"rows of {size.seq_len} tokens" if size.unit == "rows" else size.unit
    named = run.model.preset or run.model.architecture
    precision = devices.of(strategy.device).dtype_name(run.compute.dtype, strategy.device)
    rows = [
        ("model", f"{named}, {estimate.parameters:,} parameters, {estimate.trainable_parameters:,} trainable"),
        ("examples", f"{estimate.rows_per_epoch:,} {unit}, {size.padding_fraction:.1%} padding"),
        ("epochs", f"{estimate.epochs:.2f}"),
        ("batch per device", f"{batch_geometry(run, strategy.world, strategy.device).micro_size} {size.unit}"),
        ("total batch", f"{run.batch.size} {size.unit} = {estimate.tokens_per_step:,} tokens"),
        ("accumulation", f"{prepared.context.accumulate} on each of {strategy.world} {strategy.device.type}"),
        ("optimizer steps", f"{estimate.steps:,}"),
        ("tokens", f"{units.count(estimate.tokens)} of {units.count(estimate.tokens_per_epoch)} per epoch"),
        (
            "compute",
            f"{estimate.flops:.2e} FLOPs (causal), "
            f"{estimate.flops_per_token_full_square * estimate.tokens:.2e} full square, in {precision}",
        ),
        ("learning", f"{run.optimizer.name} at {run.optimizer.learning_rate:g}, {run.schedule.name}"),
        ("memory", f"{units.gibibytes(estimate.predicted_peak_memory_bytes)} ({estimate.memory_source})"),
        ("time", f"{_duration(estimate)} at {_speed(estimate)}"),
        ("step", _step_line(estimate)),
        *_money_lines(estimate, strategy),
    ]
    rows += [*source_rows(estimate.sources), *prepared.stage.describe(), *further]
    print_table(console, (), [(f"  {name}", value) for name, value in rows], title=f"{run.stage} -> {run.out}")
    print_decisions(run.decisions, console)
    for note in prepared.stage.notes:
        console.print(Text(f"  {note}"))
    for note in prepared.notes:
        console.print(escape_markup("note", note))
    for warning in estimate.warnings:
        console.print(escape_markup("warning", warning))
    if run.sample.every and not run.sample.prompts:
        console.print(escape_markup("note", f"sample.every={run.sample.every} writes nothing without sample.prompts"))
    if prepared.resumed_from is not None:
        console.print(f"  continues after step {prepared.resumed_from} of {estimate.steps}")


def source_rows(sources: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Of the largest sources their tokens, their share of the training, and how often they repeat."""
    by_size = sorted(enumerate(sources, start=1), key=lambda one: -one[1]["tokens"])
    for number, one in sorted(by_size[:SHOWN_SOURCES], key=lambda one: one[0]):
        of_training = f"{one['share']:.1%} of training, {one['epochs']:.2f} epochs"
        yield f"source {number}", f"{one['name']}: {units.count(one['tokens'])} tokens, {of_training}"
    if rest := [one["tokens"] for _, one in by_size[SHOWN_SOURCES:]]:
        yield "other sources", f"{len(rest):,}, with {units.count(sum(rest))} tokens"


def _step_line(estimate: RunEstimate) -> str:
    """The time of a step by part, and the run's time outside steps."""
    step = sum(estimate.step_parts_seconds.values())
    shares = ", ".join(
        f"{name.replace('_', ' ')} {seconds / step:.0%}"
        for name, seconds in estimate.step_parts_seconds.items()
        if step and seconds / step >= 0.005
    )
    other = _other_parts(estimate, 0.05)
    return f"{estimate.step_seconds * 1e3:.4g} ms: {shares}" + (f"; outside steps: {other}" if other else "")


def _money_lines(estimate: RunEstimate, strategy: Strategy) -> list[tuple[str, str]]:
    """Cost, if a price is known, and energy."""
    world, seconds = strategy.world, estimate.predicted_seconds
    card = match_gpu_spec(devices.of(strategy.device).name(strategy.device))
    price = cost.price_of(card.name) if card else None
    energy = cost.kilowatt_hours(seconds, world, card.watts if card else 0.0, host.physical_cores())
    lines = [("energy", f"{energy:.2g} kWh (estimate)")]
    return [("cost", f"{cost.cost(price, seconds, world)} at {price}"), *lines] if price else lines
