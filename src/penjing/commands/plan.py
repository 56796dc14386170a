"""The bill before the run, on one page: penjing plan pretrain --gpu "RTX 3090". No GPU and no data are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penjing.base import config
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.commands.plan_advice import advice, alternatives
from penjing.commands.plan_fit import fit, foreign_memory
from penjing.commands.plan_run import (
    Amount,
    Asked,
    UnitLengths,
    amount_of,
    checkpoint_bytes,
    find_machine,
    learns,
    lengths_of,
    not_run,
    parts_of,
    pass_rows,
    workload_of,
)
from penjing.convert.shape import config_from_hf
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost, hardware
from penjing.plan.device_model import LEVELS, MARGINS, Machine
from penjing.plan.flops import components, parameters, training_flops_per_token, windowed_keys
from penjing.plan.gpu_specs import card_called
from penjing.plan.memory import is_tight
from penjing.plan.shape import Shape, shape_from_hf, shape_of
from penjing.plan.step_time import StepTime, interval, step_time
from penjing.plan.step_workload import Workload
from penjing.recipes.pretrain import pretrain
from penjing.train.config import Run
from penjing.train.small_data import doubts, fit_batch, fit_rows

EXIT_DOES_NOT_FIT = 3


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything the page says, as data. Bytes, seconds, FLOPs."""

    what: str
    device: str
    devices: int
    level: str
    source: str
    parameters: int
    active_parameters: int
    components: dict[str, int]
    flops_per_token: float
    flops_per_token_full_square: float
    tokens: int
    tokens_reason: str
    unique_tokens: int
    epochs: float
    steps: int
    rows_per_step: int
    micro_rows: int
    passes: int
    row_tokens: int
    tokens_per_step: int
    dtype: str
    step_parts_seconds: dict[str, float]
    step_seconds: float
    bottleneck: str
    parts_seconds: dict[str, float]
    predicted_seconds: float
    predicted_seconds_low: float
    predicted_seconds_high: float
    tokens_per_second: float
    mfu_causal: float | None
    mfu_full_square: float | None
    peak_memory_bytes: int
    memory_bytes: int  # of the device; 0 = not known
    fits: bool | None
    tight: bool  # by less than the figure may be off
    waterfall: dict[str, int]
    peak_at: str
    largest_micro_rows: int
    disk_data_bytes: int
    disk_checkpoint_bytes: int
    cost: str
    price: str
    kilowatt_hours: float
    advice: list[str]
    alternatives: list[str]
    warnings: list[str]
    formulas: list[str] = field(default_factory=list)
    over_budget: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _fitted_to_data(run: Run, asked: Asked) -> Run:
    """The run with the rows and the batch that training takes of so much data. No conversation is taken to need longer
    rows than that."""
    if not asked.unique:
        return run
    unique, total = cost.read_count(asked.unique, "--unique"), asked.tokens not in ("", "auto")
    epochs = cost.read_count(asked.tokens, "--tokens") / unique if total else run.epochs
    run = replace(run, data=fit_rows(replace(run, epochs=epochs), unique, 0).data)
    units_per_epoch = max(1, round(unique / lengths_of(run).tokens))
    return replace(run, batch=fit_batch(replace(run, epochs=epochs), units_per_epoch, asked.gpus).batch)


def make_page(what: str, run: Run, asked: Asked, foreign: Shape | None = None) -> Page:
    """The whole page from settings alone. foreign: the shape of a model that we do not train; its memory is a formula.

    Raises UserError for bad input.
    """
    budget = cost.read_budget(asked.budget) if asked.budget else cost.Budget()
    machine, target, warnings = find_machine(asked, run)
    if budget.memory_bytes:
        target = replace(target, memory_bytes=min(budget.memory_bytes, target.memory_bytes or budget.memory_bytes))
    shape = foreign or shape_of(run.model)
    longest_row = run.data.row_tokens
    run = _fitted_to_data(run, asked)
    lengths = lengths_of(run)
    amount = amount_of(run, asked, lengths, shape)
    wanted = pass_rows(run, machine.kind, asked.gpus)
    fitted = None if foreign is not None else fit(run, target, asked, wanted)
    micro = fitted.micro_rows if fitted else wanted
    memory = fitted.plan if fitted else None
    work = workload_of(run, shape, lengths, machine, micro_rows=micro, asked=asked, steps=amount.steps)
    step = step_time(work, machine)
    parts, generation = parts_of(run, shape, step, work, machine, amount.steps, asked.gpus)
    seconds = sum(parts.values())
    low, high = interval(seconds, MARGINS[machine.level])
    causal, full = _flops(run, lengths, foreign)
    per_step = round(run.batch.rows * lengths.tokens)
    busy = parts["training"] / amount.steps
    rate = per_step / busy
    peak = machine.peak_flops.get(work.dtype)
    total_bytes = memory.total_bytes if memory else round(foreign_memory(shape, work))
    room = target.memory_bytes
    fits = (total_bytes <= room) if room else None
    if fitted:
        warnings += fitted.notes
        warnings += [said] if asked.engine and (said := not_run(asked.engine)) else []
    if run.compute.float8 != "off":
        warnings.append("time is that of bfloat16: what float8 gains is not predicted")
    if lengths.note:
        warnings.append(f"without data {lengths.note}")
    if run.data.row_tokens < longest_row:
        warnings.append(
            f"without data conversations are taken to fit rows of {run.data.row_tokens} tokens, which so few fill; "
            f"a longer conversation makes rows longer, up to {longest_row}"
        )
    units_per_epoch = amount.unique / lengths.tokens if amount.unique else math.inf
    warnings += doubts(amount.steps, run.batch.rows, units_per_epoch, "rows")
    if amount.unique:
        said = tokens.repeat_warning(amount.epochs)
        warnings += [said] if said else []
        warnings += tokens.small_data_advice(shape.parameters, amount.unique)
    price = cost.price_of(machine.name, asked.price)
    spent = cost.cost(price, seconds, asked.gpus) if price else None
    page = Page(
        what=what,
        device=machine.name,
        devices=asked.gpus,
        level=machine.level,
        source=machine.source,
        parameters=shape.parameters,
        active_parameters=shape.parameters if foreign else parameters(run.model).active,
        components={} if foreign else components(run.model),
        flops_per_token=causal,
        flops_per_token_full_square=full,
        tokens=amount.tokens,
        tokens_reason=amount.reason,
        unique_tokens=amount.unique,
        epochs=amount.epochs,
        steps=amount.steps,
        rows_per_step=run.batch.rows,
        micro_rows=micro,
        passes=work.passes,
        row_tokens=run.data.row_tokens,
        tokens_per_step=per_step,
        dtype=work.dtype,
        step_parts_seconds={**step.to_dict(), **({"generation": generation} if generation else {})},
        step_seconds=busy,
        bottleneck="generation" if generation > step.seconds / 2 else step.bottleneck,
        parts_seconds=parts,
        predicted_seconds=seconds,
        predicted_seconds_low=low,
        predicted_seconds_high=high,
        tokens_per_second=rate,
        mfu_causal=rate * causal / (peak * asked.gpus) if peak else None,
        mfu_full_square=rate * full / (peak * asked.gpus) if peak else None,
        peak_memory_bytes=total_bytes,
        memory_bytes=target.memory_bytes,
        fits=fits,
        tight=is_tight(total_bytes, room),
        waterfall=dict(memory.waterfall) if memory else {},
        peak_at=f"{memory.peak_at} at {memory.peak_line}" if memory else "",
        largest_micro_rows=fitted.largest if fitted else 0,
        disk_data_bytes=round((amount.unique or amount.tokens) * tokens.token_bytes(shape.vocabulary)),
        disk_checkpoint_bytes=checkpoint_bytes(run, shape),
        cost=str(spent) if spent else "",
        price=f"{price.hour} an hour, {price.source}" if price else "",
        kilowatt_hours=cost.kilowatt_hours(seconds, asked.gpus, machine.watts, hardware.physical_cores()),
        advice=advice(run, shape, amount),
        alternatives=alternatives(run, asked, machine, fitted, work, seconds),
        warnings=warnings,
        formulas=_formulas(shape, work, machine, step, amount, causal, full),
        over_budget=_over(budget, seconds, spent, total_bytes),
    )
    return page


def _flops(run: Run, lengths: UnitLengths, foreign: Shape | None) -> tuple[float, float]:
    """Per token, causal and full square."""
    square = run.data.row_tokens
    if foreign is not None:
        per_key, windows = 12.0 * foreign.query_size, foreign.windows or (0,) * foreign.layers
        keys = sum(windowed_keys(lengths.keys, each) for each in windows)
        return 6.0 * foreign.matrices + per_key * keys, 6.0 * foreign.matrices + per_key * foreign.layers * square
    how: dict[str, Any] = {"trainable": learns(run), "extra_forwards": lengths.extra_forwards}
    return (
        training_flops_per_token(run.model, lengths.keys, **how),
        training_flops_per_token(run.model, square, window_keys=square, **how),
    )


def _formulas(
    shape: Shape, work: Workload, machine: Machine, step: StepTime, amount: Amount, causal: float, full: float
) -> list[str]:
    """Each figure's formula with its numbers."""
    rate, moved = machine.rate(work.dtype), machine.bytes_per_second
    keys = sum(work.layer_keys()) / shape.layers
    attention = machine.attention_rate(work.dtype, keys)
    launches = f"{work.kernels():.0f} x {machine.launch_seconds * 1e6:.3g} us"
    if machine.kind != "cpu":
        launches = f"max(0, {launches} - the above)"
    n = work.passes
    return [
        f"M = {shape.matrices:,} parameters in matrices, the head among them (N = {shape.parameters:,})",
        f"FLOPs a token, causal: 6 M + 12 L H K x {keys:g} keys = {causal:.4g}; "
        f"full square: 6 M + 12 L H K x {work.row_tokens} = {full:.4g}",
        f"tokens = {amount.tokens:,} ({amount.reason}); steps = tokens / {work.tokens * n * work.ranks:,} a step",
        f"products: {n} x {work.product_flops():.4g} FLOPs / {rate / 1e12:.4g} TFLOPS = {step.products:.4g} s",
        f"attention: {n} x {work.attention_flops():.4g} FLOPs / {attention / 1e12:.4g} TFLOPS = {step.attention:.4g} s",
        f"elementwise: {n} x {work.elementwise_bytes():.4g} bytes / {moved / 1e9:.4g} GB/s = {step.elementwise:.4g} s",
        f"logits and loss: {n} x {work.head_bytes():.4g} bytes / {moved / 1e9:.4g} GB/s = {step.head:.4g} s",
        f"launches: {n} x {launches} = {step.launch:.4g} s",
        f"optimizer: {work.optimizer_bytes():.4g} bytes / {moved / 1e9:.4g} GB/s + "
        f"{work.optimizer_flops():.4g} FLOPs = {step.optimizer:.4g} s",
        f"exchange: {work.exchanged_bytes():.4g} bytes / {machine.bus_bytes_per_second / 1e9:.4g} GB/s, the exposed "
        f"part = {step.communication:.4g} s",
        f"interval: +-{MARGINS[machine.level]:.0%} at {machine.level}, {LEVELS[machine.level]}",
    ]


def over_budget(asked: Asked, seconds: float, memory: int, device: str) -> list[str]:
    """What a plan takes beyond --budget, for a plan that was made by a probe, on one device."""
    if not asked.budget:
        return []
    card = card_called(device)
    price = cost.price_of(card.name if card else device, asked.price)
    spent = cost.cost(price, seconds, 1) if price else None
    return _over(cost.read_budget(asked.budget), seconds, spent, memory)


def _over(budget: cost.Budget, seconds: float, spent: cost.Money | None, memory: int) -> list[str]:
    lines = []
    if budget.seconds and seconds > budget.seconds:
        lines.append(f"{units.duration(seconds)} of at most {units.duration(budget.seconds)}")
    if budget.memory_bytes and memory > budget.memory_bytes:
        lines.append(f"{units.gibibytes(memory)} of at most {units.gibibytes(budget.memory_bytes)}")
    if budget.money:
        if spent is None:
            lines.append("no price is known: give --price")
        elif spent.currency != budget.money.currency:
            lines.append(f"the price is in {spent.currency}, the budget in {budget.money.currency}")
        elif spent.amount > budget.money.amount:
            lines.append(f"{spent} of at most {budget.money}")
    return lines


def read_foreign(path: Path, settings: Mapping[str, Any]) -> tuple[Run, Shape | None]:
    """A Hugging Face `config.json` or its folder, as a pretraining run of that shape.

    The shape of a class that we do not train comes beside it; the run then has stand-in settings.
    """
    file = path / "config.json" if path.is_dir() else path
    given = read_json(file)
    if not isinstance(given, dict):
        raise UserError("not a model's config.json", where=file)
    base = {**pretrain(), "stage": "pretrain"}
    try:
        shape = config.to_dict(config_from_hf(given, file))
    except UserError:
        foreign = shape_from_hf(given, file)
        return config.resolve(Run, base, {**settings, "model": {"max_tokens": 1 << 20}}), foreign
    return config.resolve(Run, {**base, "model": shape}, settings), None


def is_foreign(what: str) -> bool:
    path = Path(what)
    return what.endswith(".json") or (path / "config.json").is_file()
