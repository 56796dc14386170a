"""The plan of a run on one page: penjing plan pretrain --gpu "RTX 3090". No GPU and no data are needed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penjing.base import config
from penjing.base import formatting as units
from penjing.base.config import Decision
from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.convert.shape import config_from_hf
from penjing.data.token_shards import id_dtype
from penjing.devices import host
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan.device_model import LEVELS, MARGINS, Machine
from penjing.plan.flops import components, parameters, training_flops_per_token
from penjing.plan.gpu_specs import match_gpu_spec
from penjing.plan.layout import Layout
from penjing.plan.memory import Target, is_tight
from penjing.plan.shape import Shape, shape_of
from penjing.plan.step_time import StepTime, interval, optimizer_ranks, step_time
from penjing.plan.step_workload import Workload
from penjing.planner.advice import advice, alternatives, expected_loss
from penjing.planner.fit import Fitted, fit, rough_fit
from penjing.planner.inputs import (
    PlanOptions,
    TokenBudget,
    amount_of,
    checkpoint_bytes,
    dtype_of,
    find_machine,
    lengths_of,
    parts_of,
    trainable_part,
    unique_tokens,
    workload_of,
)
from penjing.planner.strategies import StrategyPlan, compare_strategies
from penjing.recipes.pretrain import pretrain
from penjing.train.config import Run
from penjing.train.memory_trace.fit import automatic_strategy
from penjing.train.resolve import Facts, decide, resolve, with_settings
from penjing.train.step_probe import data_warnings


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """All figures of the page. Bytes, seconds, FLOPs."""

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
    micro_size: int
    passes: int
    seq_len: int
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
    memory_bytes: int  # of the device; 0 = unknown
    traced: bool  # otherwise memory is by formula
    fits: bool | None
    tight: bool  # fits, but by less than the error margin
    waterfall: dict[str, int]
    peak_at: str
    largest_micro_size: int
    disk_data_bytes: int
    disk_checkpoint_bytes: int
    cost: str
    price: str
    kilowatt_hours: float
    expected_loss: float | None  # nats per token by a published law, whose texts are others; None: it does not hold
    advice: list[str]
    alternatives: list[str]
    warnings: list[str]
    formulas: list[str] = field(default_factory=list)
    over_budget: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    strategies: list[StrategyPlan] = field(default_factory=list)


class PlanFacts(Facts):
    """What a plan assumes: the device of the options, and conversations that fit any row."""

    def __init__(self, options: PlanOptions, machine: Machine, target: Target | None, unique: int) -> None:
        """target: of traces; None: nothing is traced. unique: tokens of the data; 0: unknown."""
        self.unique = unique
        self._options, self._machine, self._target, self.world = options, machine, target, options.gpus
        self.strategy = "auto"

    def dtype(self, run: Run) -> tuple[str, str]:
        # With float8 the trace decides: it names what the card lacks.
        dtype = dtype_of(run, self._machine) if run.compute.fp8 == "off" else run.compute.dtype
        return dtype, f"the fastest on {self._machine.name}"

    def conversations(self, run: Run) -> tuple[int, int] | None:
        return (self.unique, 0) if self.unique else None

    def strategy_of(self, run: Run) -> tuple[str, str]:
        if self.world == 1 or self._target is None:
            return "", ""
        self.strategy, why = automatic_strategy(run, self._target, self.world, self._options.layout(run).nodes)
        return self.strategy, why

    def memory_bytes(self) -> int:
        return self._target.memory_bytes if self._target else 0

    def units_per_epoch(self, run: Run) -> int | None:
        return max(1, round(self.unique / lengths_of(run).tokens)) if self.unique else None


def make_report(what: str, run: Run, options: PlanOptions, *, trace: bool = True) -> PlanReport:
    """The full report, from settings alone. Without `trace` its memory is by formula: in milliseconds instead of
    seconds. Raises UserError for bad input.
    """
    budget = cost.read_budget(options.budget) if options.budget else cost.Budget()
    machine, target, warnings = find_machine(options, run)
    if budget.memory_bytes:
        target = replace(target, memory_bytes=min(budget.memory_bytes, target.memory_bytes or budget.memory_bytes))
    shape = shape_of(run.model)
    longest_row = run.data.seq_len
    dtype, (unique, source) = run.compute.dtype, unique_tokens(run, options)
    facts = PlanFacts(options, machine, target if trace else None, unique)
    any_strategy = run = resolve(_with_epochs(run, options, unique), facts)
    if run.parallel.strategy == "auto":
        run = with_settings(run, {"parallel.strategy": facts.strategy})
    amount = amount_of(run, options, shape, unique, source)
    fitted = fit(run, target, options) if trace else None
    micro, memory = _memory(fitted, target.memory_bytes, lambda: rough_fit(run, machine, target, options))
    work = workload_of(run, machine, options, micro, steps=amount.steps)
    step = step_time(work, machine)
    parts, generation = parts_of(run, work, machine, amount.steps, amount.unique or amount.tokens)
    seconds = sum(parts.values())
    low, high = interval(seconds, MARGINS[machine.level])
    causal, full_square = _flops(run)
    per_step = round(run.batch.size * lengths_of(run).tokens)
    busy = parts["training"] / amount.steps
    peak = machine.peak_flops.get(work.dtype, 0.0) * options.gpus
    price = cost.price_of(machine.name, options.price)
    spent = cost.cost(price, seconds, options.gpus) if price else None
    warnings += [*(fitted.notes if fitted else []), *network_notes(work.layout, machine, options)]
    return PlanReport(
        what=what,
        device=machine.name,
        devices=options.gpus,
        level=machine.level,
        source=machine.source,
        parameters=shape.parameters,
        active_parameters=parameters(run.model).active,
        components=components(run.model),
        flops_per_token=causal,
        flops_per_token_full_square=full_square,
        tokens=amount.tokens,
        tokens_reason=amount.reason,
        unique_tokens=amount.unique,
        epochs=amount.epochs,
        steps=amount.steps,
        rows_per_step=run.batch.size,
        micro_size=micro,
        passes=work.passes,
        seq_len=run.data.seq_len,
        tokens_per_step=per_step,
        dtype=work.dtype,
        step_parts_seconds={**asdict(step), **({"generation": generation} if generation else {})},
        step_seconds=busy,
        bottleneck="generation" if generation > step.seconds / 2 else step.bottleneck,
        parts_seconds=parts,
        predicted_seconds=seconds,
        predicted_seconds_low=low,
        predicted_seconds_high=high,
        tokens_per_second=per_step / busy,
        mfu_causal=per_step / busy * causal / peak if peak else None,
        mfu_full_square=per_step / busy * full_square / peak if peak else None,
        **memory,
        expected_loss=expected_loss(run, shape, amount),
        disk_data_bytes=round((amount.unique or amount.tokens) * id_dtype(shape.vocabulary).itemsize),
        disk_checkpoint_bytes=checkpoint_bytes(run, shape),
        cost=str(spent) if spent else "",
        price=str(price) if price else "",
        kilowatt_hours=cost.kilowatt_hours(seconds, options.gpus, machine.watts, host.physical_cores()),
        advice=advice(run, shape, amount),
        # Another GPU decides its own dtype.
        alternatives=alternatives(with_settings(run, {"compute.dtype": dtype}), machine, fitted, work, seconds),
        warnings=warnings + _warnings(run, amount, shape, longest_row),
        formulas=_formulas(work, machine, step, amount, causal, full_square),
        over_budget=_over(budget, seconds, spent, memory["peak_memory_bytes"]),
        decisions=list(run.decisions),
        strategies=compare_strategies(any_strategy, machine, target, options, amount.steps) if fitted else [],
    )


def network_notes(layout: Layout, machine: Machine, options: PlanOptions) -> list[str]:
    """What is assumed of several machines."""
    if layout.nodes == 1:
        return []
    rate = layout.network(machine.bus_bytes_per_second) * 8 / 1e9
    source = "--network" if options.network else "an estimate: --network"
    each = layout.ranks // layout.nodes
    return [f"{layout.nodes} machines of {each} GPUs, {rate:.0f} Gbit/s from each to the others ({source})"]


def _with_epochs(run: Run, options: PlanOptions, unique: int) -> Run:
    """The run with as many epochs of the data as make --tokens, if both are known."""
    if not unique or options.tokens in ("", "auto"):
        return run
    return decide(run, "epochs", cost.read_count(options.tokens, "--tokens") / unique, "--tokens")


def _memory(
    fitted: Fitted | None, limit: int, rough: Callable[[], tuple[int, dict[str, int]]]
) -> tuple[int, dict[str, Any]]:
    """The micro-batch size, and the memory fields of the report: traced, or `rough`. limit: of the device; 0 =
    unknown."""
    plan = fitted.plan if fitted else None
    micro_size, parts = (fitted.micro_size, plan.waterfall) if fitted and plan else rough()
    total_bytes = plan.total_bytes if plan else sum(parts.values())
    return micro_size, {
        "waterfall": dict(parts),
        "peak_memory_bytes": total_bytes,
        "memory_bytes": limit,
        "traced": plan is not None,
        "fits": total_bytes <= limit if limit else None,
        "tight": is_tight(total_bytes, limit),
        "peak_at": f"{plan.peak_at} at {plan.peak_line}" if plan else "",
        "largest_micro_size": fitted.largest if fitted else 0,
    }


def _warnings(run: Run, amount: TokenBudget, shape: Shape, longest_row: int) -> list[str]:
    """Warnings about the settings and the amount of data. longest_row: seq_len of the settings."""
    warnings, lengths = [], lengths_of(run)
    if run.compute.fp8 != "off":
        warnings.append("the time is for bfloat16: the speed-up of float8 is not predicted")
    if lengths.note:
        warnings.append(lengths.note)
    if run.data.seq_len < longest_row:
        warnings.append(
            f"conversations are assumed to fit rows of {run.data.seq_len} tokens; "
            f"a longer conversation makes rows longer, up to {longest_row}"
        )
    units_per_epoch = amount.unique / lengths.tokens if amount.unique else math.inf
    warnings += data_warnings(amount.steps, run.batch.size, units_per_epoch, "rows")
    if amount.unique:
        repeated = tokens.repeat_warning(amount.epochs)
        warnings += [repeated] if repeated else []
        if run.data.format == "documents" and not run.init_from:
            warnings += tokens.small_data_advice(shape.parameters, amount.unique)
    return warnings


def _flops(run: Run) -> tuple[float, float]:
    """FLOPs per token, causal and full square."""
    square, lengths = run.data.seq_len, lengths_of(run)
    options: dict[str, Any] = {"trainable": trainable_part(run), "extra_forwards": lengths.extra_forwards}
    return (
        training_flops_per_token(run.model, lengths.keys, **options),
        training_flops_per_token(run.model, square, window_keys=square, **options),
    )


def _formulas(
    work: Workload, machine: Machine, step: StepTime, amount: TokenBudget, causal: float, full: float
) -> list[str]:
    """The formula of each figure, with its numbers."""
    shape, rate, moved = work.shape, machine.rate(work.dtype), machine.bytes_per_second
    keys = sum(work.layer_keys()) / shape.layers
    attention = machine.attention_rate(work.dtype, keys)
    launches = f"{work.kernels():.0f} x {machine.launch_seconds * 1e6:.3g} us"
    if not machine.on_host:
        launches = f"max(0, {launches} - the above)"
    n, sharing = work.passes, optimizer_ranks(work, machine)
    sent = sum(work.communication_bytes()) + work.shared_weight_bytes(sharing)
    return [
        f"M = {shape.matrices:,} parameters in matrices, including the head (N = {shape.parameters:,})",
        f"FLOPs per token, causal: 6 M + 12 L H K x {keys:g} keys = {causal:.4g}; "
        f"full square: 6 M + 12 L H K x {work.seq_len} = {full:.4g}",
        f"tokens = {amount.tokens:,} ({amount.reason}); steps = tokens / {work.tokens * n * work.ranks:,} per step",
        f"matmul: {n} x {work.matmul_flops():.4g} FLOPs / {rate / 1e12:.4g} TFLOPS = {step.matmuls:.4g} s",
        f"attention: {n} x {work.attention_flops():.4g} FLOPs / {attention / 1e12:.4g} TFLOPS = {step.attention:.4g} s",
        f"elementwise: {n} x {work.elementwise_bytes():.4g} bytes / {moved / 1e9:.4g} GB/s = {step.elementwise:.4g} s",
        f"logits and loss: {n} x {work.head_bytes():.4g} bytes / {moved / 1e9:.4g} GB/s = {step.head:.4g} s",
        f"launches: {n} x {launches} = {step.launch:.4g} s",
        f"optimizer: {work.optimizer_bytes():.4g} bytes / {moved / 1e9:.4g} GB/s + "
        f"{work.optimizer_flops():.4g} FLOPs / {sharing} / {rate / 1e12:.4g} TFLOPS = {step.optimizer:.4g} s",
        f"communication: {sent:.4g} bytes / {machine.bus_bytes_per_second / 1e9:.4g} GB/s, "
        f"exposed part = {step.communication:.4g} s",
        f"interval: +-{MARGINS[machine.level]:.0%} at {machine.level}, {LEVELS[machine.level]}",
    ]


def over_budget(options: PlanOptions, seconds: float, memory: int, device: str) -> list[str]:
    """Limits of --budget that a plan with measured steps exceeds, on one device."""
    if not options.budget:
        return []
    card = match_gpu_spec(device)
    price = cost.price_of(card.name if card else device, options.price)
    spent = cost.cost(price, seconds, 1) if price else None
    return _over(cost.read_budget(options.budget), seconds, spent, memory)


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


def read_external(path: Path, settings: Mapping[str, Any]) -> Run:
    """A Hugging Face `config.json` or its folder, as a pretraining run of that shape. Raises UserError if penjing
    cannot train that architecture."""
    file = path / "config.json" if path.is_dir() else path
    hf_config = read_json(file)
    if not isinstance(hf_config, dict):
        raise UserError("not the config.json of a model", where=file)
    model = config.to_dict(config_from_hf(hf_config, file))
    return config.resolve(Run, {**pretrain(), "stage": "pretrain", "model": model}, settings)


def is_external(what: str) -> bool:
    path = Path(what)
    return what.endswith(".json") or (path / "config.json").is_file()
