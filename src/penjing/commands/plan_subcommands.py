"""The planner's smaller questions: penjing plan memory, search, tokens and estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.markup import marked
from penjing.commands.plan import model_of
from penjing.commands.plan_print import verdict_of
from penjing.commands.plan_run import Asked, Engine, find_machine, lengths_of, not_run, pass_rows, workload_of
from penjing.model.transformer import Recompute
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan import six_nd_formula as textbook
from penjing.plan.config_search import Candidate, divisors, fitting, pareto
from penjing.plan.device_model import LEVELS, MARGINS, Machine, machine_of_card
from penjing.plan.flops import parameters
from penjing.plan.gpu_specs import find_card
from penjing.plan.memory.device_target import MEMORY_MARGIN, is_tight, safe_bytes
from penjing.plan.shape import Shape, shape_of
from penjing.plan.step_time import interval, step_time
from penjing.plan.step_workload import Workload
from penjing.train.config import Run

BAR = 40  # characters of the longest bar
MOST_TRACED = 40  # configurations of one search


def print_memory(run: Run, asked: Asked, console: Console, *, waterfall: bool = False) -> bool | None:
    """The traced peak, where it is and what it is made of; whether it fits (None: the device's memory is not known)."""
    from penjing.train.memory_trace.trace import predict_memory

    _, target, _ = find_machine(asked, run)
    engine: Engine = asked.engine or ("ddp" if asked.gpus > 1 else "single")
    plan = predict_memory(run, target, ranks=asked.gpus, engine=engine)
    room = f" of {units.gibibytes(target.memory_bytes)}" if target.memory_bytes else ""
    fits = None if not target.memory_bytes else plan.total_bytes <= target.memory_bytes
    verdict = verdict_of(fits, is_tight(plan.total_bytes, target.memory_bytes))
    kind = "allocated and reserved by torch" if target.kind == "cuda" else "of tensors"
    console.print(Text(f"{units.gibibytes(plan.total_bytes)}{room} on {target.name}: ") + verdict)
    console.print(
        f"  {kind}: {units.gibibytes(plan.peak_allocated_bytes)}, {units.gibibytes(plan.peak_reserved_bytes)}; "
        f"the peak is made by {plan.peak_at} at {plan.peak_line}, {plan.peak_phase}",
        highlight=False,
    )
    if waterfall:
        most = max(plan.waterfall.values())
        for name, size in plan.waterfall.items():
            bar = "#" * round(BAR * size / most)
            console.print(f"  {name:<16} {units.gibibytes(size):>10}  {bar}", highlight=False, markup=False)
    for note in plan.notes:
        console.print(marked("note", note))
    return fits


def search(run: Run, asked: Asked, fit: str, lengths: tuple[int, ...], console: Console, *, every: bool = False) -> int:
    """Print the Pareto table of traced ways to take a step; returns how many fit.

    Several devices share it as training does, or as `asked.engine` says. Raises UserError for a bad size of memory, and
    for rows that do not divide among the devices.
    """
    from penjing.train.memory_trace.trace import predict_memory

    budget = cost.read_budget(fit, "--fit") if fit else cost.Budget()
    if fit and not budget.memory_bytes:
        raise UserError("not a size of memory", where="--fit", got=repr(fit), wanted="such as 24GB or 8GiB")
    machine, target, notes = find_machine(asked, run)
    room = budget.memory_bytes or target.memory_bytes
    pass_rows(replace(run, batch=replace(run.batch, micro_rows=0)), machine.kind, asked.gpus)
    engine: Engine = asked.engine or ("ddp" if asked.gpus > 1 else "single")
    ways = [
        (variant, rows)
        for row_tokens in lengths or (run.data.row_tokens,)
        for variant in _recomputing(replace(run, data=replace(run.data, row_tokens=row_tokens)))
        for rows in reversed(divisors(run.batch.rows // asked.gpus))
    ]
    if len(ways) > MOST_TRACED:
        notes.append(f"only the first {MOST_TRACED} of {len(ways)} configurations were traced")
    found: list[Candidate] = []
    for variant, rows in ways[:MOST_TRACED]:
        plan = predict_memory(variant, target, micro_rows=rows, ranks=asked.gpus, engine=engine)
        found.append(_candidate(variant, machine, asked, engine, rows, plan.total_bytes))
    if said := not_run(engine):
        notes.append(said)
    fit_now = fitting(found, safe_bytes(room)) if room else sorted(found, key=lambda each: -each.tokens_per_second)
    shown = found if every else pareto(fit_now)
    table = Table(box=None, pad_edge=False, title=f"{run.stage} on {asked.gpus} x {machine.name}, {machine.level}")
    headings = ("rows in a pass", "passes", "row tokens", "recomputed", "sharding", "peak (traced)", "step", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for each in shown:
        table.add_row(
            str(each.micro_rows),
            str(each.passes),
            str(each.row_tokens),
            each.recompute,
            each.sharding,
            units.gibibytes(each.peak_bytes),
            units.duration(each.seconds),
            units.count(float(f"{each.tokens_per_second:.3g}")),
        )
    console.print(table)
    limit = units.gibibytes(room) if room else "no known limit"
    kept_free = f", {MEMORY_MARGIN:.1%} of it kept free for what these figures may be off" if room else ""
    console.print(f"{len(fit_now)} of {len(found)} traced configurations fit {limit}{kept_free}", highlight=False)
    if fit_now:
        best = fit_now[0]
        shared = f", {best.sharding} over {asked.gpus} devices" if asked.gpus > 1 else ""
        console.print(
            f"fastest: batch.micro_rows={best.micro_rows} data.row_tokens={best.row_tokens} "
            f"compute.recompute={best.recompute}{shared}",
            highlight=False,
        )
    for note in notes:
        console.print(marked("note", note, indent=""))
    return len(fit_now)


def _recomputing(run: Run) -> list[Run]:
    """The run with each way of computing activations again, where it can have them."""
    if run.model.is_mixture or run.lora.dropout:
        return [run]
    return [replace(run, compute=replace(run.compute, recompute=how)) for how in get_args(Recompute)]


def _candidate(run: Run, machine: Machine, asked: Asked, engine: Engine, rows: int, peak: int) -> Candidate:
    lengths = lengths_of(run)
    asked = replace(asked, engine=engine)
    shape = shape_of(run.model)
    work = workload_of(run, shape, lengths, machine, micro_rows=rows, asked=asked)
    seconds = step_time(work, machine).seconds
    return Candidate(
        micro_rows=rows,
        passes=work.passes,
        row_tokens=run.data.row_tokens,
        recompute=run.compute.recompute,
        sharding=engine,
        peak_bytes=peak,
        seconds=seconds,
        tokens_per_second=run.batch.rows * lengths.tokens / seconds,
    )


def print_tokens(size: str, unique: str, hours: str, asked: Asked, console: Console) -> None:
    """How many tokens a model of this size wants, what repeating is worth, and what a time allows."""
    count = cost.read_count(size, "--params")
    model = model_of(count)
    shape = shape_of(model)
    near = parameters(model)
    best = tokens.advise(count, round(count * near.matrices / near.total))
    console.print(
        f"{units.count(count)} parameters, all counted: compute-optimal is {units.count(best.tokens)} tokens "
        f"({units.count(best.low)} to {units.count(best.high)}, four of five refits; arXiv:2404.10102), "
        f"{best.tokens / count:.1f} a parameter",
        highlight=False,
    )
    console.print(
        f"  counting matrices and head alone, {tokens.MATRICES_RATIO} a parameter: {units.count(best.by_matrices)}",
        highlight=False,
    )
    law = tokens.LAWS["corrected"]
    base = law.loss(count, best.tokens)
    for ratio in tokens.RATIOS:
        gain = law.loss(count, ratio * count) - base
        console.print(f"  {ratio:>4} a parameter = {units.count(ratio * count)}: {gain:+.3f} nats", highlight=False)
    if unique:
        there = cost.read_count(unique, "--unique")
        table = Table(box=None, pad_edge=False)
        for heading in ("epochs", "tokens", "worth in fresh ones", "each"):
            table.add_column(heading, justify="right")
        for epochs in (1, 2, 4, 8, 16, 40):
            worth = tokens.repeated_tokens(there, epochs)
            table.add_row(
                str(epochs),
                units.count(there * epochs),
                units.count(round(worth)),
                f"{tokens.repeat_worth(epochs):.0%}",
            )
        console.print(table)
        for line in tokens.small_data_advice(count, there):
            console.print(f"  {line}", highlight=False)
    if hours:
        budget = cost.read_budget(hours if not hours.replace(".", "").isdigit() else f"{hours}h", "--hours")
        if not budget.seconds:
            raise UserError("not a time", where="--hours", got=repr(hours), wanted="such as 2, 2h or 90min")
        machine, _, notes = find_machine(asked, Run(model=model))
        work = Workload(shape=shape, tokens=16384, row_tokens=512, keys=256.5, dtype=_half(machine))
        rate = work.tokens * asked.gpus / step_time(work, machine).seconds
        done = rate * budget.seconds * shape.parameters / count
        low, high = interval(done, MARGINS[machine.level])
        console.print(
            f"  {units.duration(budget.seconds)} on {asked.gpus} x {machine.name} ({machine.level}, "
            f"{LEVELS[machine.level]}) is {units.count(round(done))} tokens ({units.count(round(low))} to "
            f"{units.count(round(high))}), {done / count:.0f} a parameter",
            highlight=False,
        )
        best_size = tokens.supported_parameters(done)
        console.print(
            f"  compute-optimal for so many tokens: {units.count(round(best_size))} parameters", highlight=False
        )
        for note in notes:
            console.print(marked("note", note))


def _half(machine: Machine) -> str:
    return max(machine.product_flops, key=lambda name: machine.product_flops[name])


def print_estimate(size: str, amount: str, tflops: float, gpu: str, console: Console) -> None:
    """6 N D / peak as everybody has it, beside what we would say for a model of ours of that size."""
    count, total = cost.read_count(size, "--params"), cost.read_count(amount, "--tokens")
    if not tflops and not gpu:
        raise UserError("no speed", where="--tflops", next_step='Give --tflops 75, or --gpu "RTX 3090".')
    if tflops < 0:
        raise UserError("not above zero", where="--tflops", got=tflops, wanted="such as 75")
    card = find_card(gpu) if gpu else nearest_card(tflops)
    peak = tflops or card.half
    plain = textbook.seconds(count, total, peak * 1e12)
    machine = machine_of_card(card)
    shape = shape_of(model_of(count))
    seconds, flops = own_estimate(shape, count, total, machine)
    low, high = interval(seconds, MARGINS["L0"])
    console.print(
        f"textbook: 6 x {units.count(count)} x {units.count(total)} / {peak:g} TFLOPS = {units.duration(plain)} "
        f"({plain / 60:.0f} min), at a utilisation nobody reaches",
        highlight=False,
    )
    console.print(
        f"ours: {units.duration(seconds)} ({units.duration(low)} to {units.duration(high)}; L0, {card.name}), "
        f"{plain / seconds * peak / card.half:.0%} of the card's {card.half:g} TFLOPS by the same formula",
        highlight=False,
    )
    for name, share in flops.items():
        console.print(f"  {name:<12} {share:.0%}", highlight=False)
    memory = textbook.states(count)
    console.print(
        f"memory, textbook: weights {memory.weights / 1e9:.3g} GB + gradients {memory.gradients / 1e9:.3g} GB + Adam "
        f"{memory.moments / 1e9:.3g} GB = {memory.total / 1e9:.3g} GB in float32; activations and logits come on top: "
        "see `penjing plan memory`",
        highlight=False,
    )


def nearest_card(tflops: float) -> Any:
    """The consumer card whose stated rate is nearest."""
    from penjing.plan.gpu_specs import CARDS

    own = [card for card in CARDS.values() if card.generation == "consumer"]
    return min(own, key=lambda card: abs(card.half - tflops))


def own_estimate(shape: Shape, count: int, total: int, machine: Machine) -> tuple[float, dict[str, float]]:
    """Seconds for `total` tokens of a model of this shape, scaled to `count` parameters; shares of the step."""
    work = Workload(
        shape=shape,
        tokens=32 * 512,
        row_tokens=512,
        keys=256.5,
        dtype=_half(machine),
        fused_optimizer=True,
        compiled=True,
    )
    step = step_time(work, machine)
    seconds = step.seconds / work.tokens * total * count / shape.parameters
    shares = {name: value / step.seconds for name, value in step.to_dict().items() if value > 0}
    return seconds, dict(sorted(shares.items(), key=lambda pair: -pair[1]))
