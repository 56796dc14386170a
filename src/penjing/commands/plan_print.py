"""A plan's page on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.markup import marked
from penjing.commands.plan import Page
from penjing.plan.device_model import LEVELS
from penjing.plan.memory.device_target import MEMORY_MARGIN

SHOWN_PARTS = 4
STYLES = {"note": "yellow", "over budget": "red"}


def print_page(page: Page, console: Console, *, explain: bool = False) -> None:
    """One screen: what, how much, how long, whether it fits, what it costs, what would be better."""
    level = f"{page.level}, {LEVELS[page.level]}"
    title = f"{page.what} on {page.devices} x {page.device} ({page.source})"
    table = Table(show_header=False, box=None, pad_edge=False, title=title, title_justify="left")
    for name, value in [*_model(page), *_amount(page), *_time(page, level), *_memory(page), *_money(page)]:
        table.add_row(f"  {name}", value)
    console.print(table, highlight=False)
    for heading, lines in (
        ("advice", page.advice),
        ("better", page.alternatives),
        ("note", page.warnings),
        ("over budget", page.over_budget),
    ):
        for line in lines:
            console.print(marked(heading, line, style=STYLES.get(heading, "")), soft_wrap=True)
    if explain:
        console.print("  how it was reckoned:", highlight=False)
        for line in page.formulas:
            console.print(f"    {line}", highlight=False, soft_wrap=True, markup=False)


def _model(page: Page) -> list[tuple[str, str]]:
    active = f", {page.active_parameters:,} active" if page.active_parameters != page.parameters else ""
    parts = ", ".join(f"{name} {units.count(count)}" for name, count in page.components.items())
    return [
        ("parameters", f"{page.parameters:,}{active}" + (f" ({parts})" if parts else "")),
        (
            "FLOPs per token",
            f"{page.flops_per_token:.3e} causal (keys seen), {page.flops_per_token_full_square:.3e} full square (PaLM)",
        ),
    ]


def _amount(page: Page) -> list[tuple[str, str]]:
    unique = f", {page.epochs:.2f} epochs of {units.count(page.unique_tokens)}" if page.unique_tokens else ""
    total = page.flops_per_token * page.tokens
    return [
        ("tokens", f"{units.count(page.tokens)} ({page.tokens_reason}{unique})"),
        ("compute", f"{total:.2e} FLOPs (causal) in {page.dtype}"),
        (
            "batch",
            f"{page.rows_per_step} x {page.row_tokens} = {page.tokens_per_step:,} tokens, in {page.passes} "
            f"{'pass' if page.passes == 1 else 'passes'} of {page.micro_rows} on each device",
        ),
        ("steps", f"{page.steps:,}"),
    ]


def _time(page: Page, level: str) -> list[tuple[str, str]]:
    low, high = units.duration(page.predicted_seconds_low), units.duration(page.predicted_seconds_high)
    parts = sorted(page.step_parts_seconds.items(), key=lambda pair: -pair[1])[:SHOWN_PARTS]
    whole = sum(page.step_parts_seconds.values())
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts if seconds > 0)
    rates = f"{units.count(float(f'{page.tokens_per_second:.3g}'))} tokens/s"
    if page.mfu_causal is not None and page.mfu_full_square is not None:
        rates += f", MFU {page.mfu_causal:.0%} causal, {page.mfu_full_square:.0%} full square"
    rest = ", ".join(
        f"{name} {units.duration(seconds)}"
        for name, seconds in page.parts_seconds.items()
        if name != "training" and seconds
    )
    return [
        ("time", f"{units.duration(page.predicted_seconds)} ({low} to {high}; {level})"),
        ("step", f"{page.step_seconds * 1e3:.4g} ms, {rates} ({page.level})"),
        ("spent on", f"{shares}; beside training: {rest}"),
        ("bottleneck", page.bottleneck.replace("_", " ")),
    ]


def verdict_of(fits: bool | None, tight: bool) -> Text:
    """Whether it fits, in words."""
    if tight:
        return Text.assemble(("tight", "yellow"), f", by less than the {MEMORY_MARGIN:.1%} that this figure may be off")
    if fits is None:
        return Text("the device's memory is not known")
    return Text("fits") if fits else Text("does not fit", style="red")


def _memory(page: Page) -> list[tuple[str, str | Text]]:
    room = f" of {units.gibibytes(page.memory_bytes)}" if page.memory_bytes else ""
    verdict = verdict_of(page.fits, page.tight)
    spare = page.memory_bytes - page.peak_memory_bytes
    left = f", {units.gibibytes(spare)} to spare" if page.fits and page.memory_bytes else ""
    how = "traced" if page.waterfall else "formula, +-30 %"
    parts = sorted(page.waterfall.items(), key=lambda pair: -pair[1])[:6]
    peak = Text.assemble(f"{units.gibibytes(page.peak_memory_bytes)}{room}: ", verdict, f"{left} ({how}; a device)")
    lines: list[tuple[str, str | Text]] = [("peak memory", peak)]
    if parts:
        lines.append(("made of", ", ".join(f"{name} {units.gibibytes(size)}" for name, size in parts)))
    if page.largest_micro_rows:
        lines.append(("largest pass", f"about {page.largest_micro_rows} rows (batch.micro_rows)"))
    data, saved = units.gibibytes(page.disk_data_bytes), units.gibibytes(page.disk_checkpoint_bytes)
    lines.append(("disk", f"{data} of tokens, {saved} a checkpoint"))
    return lines


def _money(page: Page) -> list[tuple[str, str]]:
    money = f"{page.cost} at {page.price}" if page.cost else "unknown: give --price, such as --price 2USD"
    return [("cost", money), ("energy", f"{page.kilowatt_hours:.2g} kWh (estimate)")]
