"""The bill before the run, on one page: penjing plan pretrain --gpu "RTX 3090". No GPU and no data are needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from penjing.base import config, units
from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.convert.shape import config_from_hf
from penjing.model.config import ModelConfig
from penjing.objective.distill import Distill
from penjing.objective.policy import Policy
from penjing.objective.preference import WITHOUT_REFERENCE, Preference
from penjing.optim.muon import Muon
from penjing.parallel import ENGINES
from penjing.parallel.compile import COST_SECONDS, GAIN, WORTH
from penjing.plan import cost, hardware, tokens
from penjing.plan.cards import Card, card_called, find_card
from penjing.plan.flops import components, parameters, training_flops_per_token, windowed_keys
from penjing.plan.machine import LEVELS, MARGINS, Machine, machine_of_card
from penjing.plan.measure import attention_rate, copy_rate, key_of, launch_seconds, product
from penjing.plan.memory import MemoryPlan, Target, is_tight, safe_bytes
from penjing.plan.profile import find_profile, profile_called
from penjing.plan.shape import Shape, shape_from_hf, shape_of
from penjing.plan.time import Decode, StepTime, decode_time, interval, step_time
from penjing.plan.work import Workload
from penjing.recipes.pretrain import pretrain
from penjing.train.folder import set_threads
from penjing.train.run import Run
from penjing.train.small_data import doubts, fit_batch
from penjing.train.stage import micro_units

EXIT_DOES_NOT_FIT = 3
START_SECONDS = 20.0  # imports, reading data and the probe, before step 1: an estimate
WRITE_RATE = 300e6  # bytes per second of a checkpoint
STEPS_UNSAID = 1000  # of a stage whose examples are not known
MOST_LOGITS = 1 << 36  # of the largest pass that is looked for: 512 of the head's blocks, a second of tracing
CAPABILITY = {
    "pascal": (6, 0),
    "volta": (7, 0),
    "turing": (7, 5),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}
SHARDINGS = {"single": "none", "ddp": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "fsdp", "fsdp": "fsdp"}
WHOLE_BYTES = {"zero1": 8.0, "zero2": 4.0, "fsdp": 0.0}  # of a parameter's 16 that every device holds; else all
Engine = Literal["single", "ddp", "fsdp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line said beside the settings."""

    gpu: str = ""
    gpus: int = 1
    engine: Engine | Literal[""] = ""  # how several GPUs share the work; empty: ddp, or single
    budget: str = ""
    tokens: str = ""
    unique: str = ""
    price: str = ""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UserError("not above zero", where="--gpus", got=self.gpus, wanted="1 or more")


def not_run(engine: Engine) -> str:
    """What to say of a way to share work that training here does not have; empty: it has it."""
    known = " and ".join(ENGINES)
    return "" if engine in ENGINES else f"{engine} is for other programs: training here knows {known} only"


@dataclass(frozen=True, slots=True)
class _Devices:
    """Of an engine what `micro_units` asks for."""

    world: int
    device: torch.device


def pass_rows(run: Run, kind: str, gpus: int) -> int:
    """Rows (pairs, prompts) of a pass on each device, as training takes them. Raises UserError where it does."""
    return micro_units(run, _Devices(gpus, torch.device(kind)))  # type: ignore[arg-type]  # no more of an engine


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


def target_of(card: Card, machine: Machine | None = None) -> Target:
    """The device a step is traced for."""
    capability = CAPABILITY.get(card.generation, (8, 0))
    if card.generation == "consumer":
        tens = {"20": (7, 5), "30": (8, 6), "40": (8, 9), "50": (12, 0)}
        capability = tens.get(card.name.split()[1][:2], (8, 6))
    elif card.name in ("A10", "A40"):
        capability = (8, 6)
    known = {}
    if machine is not None and machine.level == "L1":
        known = {"context_bytes": machine.context_bytes, "context_source": machine.source}
    return Target(kind="cuda", name=card.name, capability=capability, memory_bytes=card.memory_bytes, **known)  # type: ignore[arg-type]


def find_machine(asked: Asked, run: Run) -> tuple[Machine, Target, list[str]]:
    """The device asked for, or this one, with its profile where there is one; and what to say about it."""
    if asked.gpu:
        card = find_card(asked.gpu)
        stored = profile_called(card.name)
        machine = machine_of_card(card) if stored is None else _with_sheet(stored.machine(), card)
        return machine, target_of(card, machine), []
    if torch.cuda.is_available() and run.compute.device not in ("cpu",):
        device = torch.device("cuda")
        name, total = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        known = card_called(name, total)
        found = find_profile(key_of(device))
        if found is None and known is None:
            raise UserError("an unknown card, never measured", where=name, next_step="Run `penjing profile` once.")
        notes = [f"the profile is stale ({', '.join(found[1])}): run `penjing profile`"] if found and found[1] else []
        machine = _with_sheet(found[0].machine(), known) if found else machine_of_card(known)  # type: ignore[arg-type]
        machine = replace(machine, memory_bytes=total)
        target = target_of(known, machine) if known else Target(kind="cuda", name=name, memory_bytes=total)
        return machine, replace(target, memory_bytes=total), notes
    return _this_cpu(run)


def _with_sheet(machine: Machine, card: Card | None) -> Machine:
    """A profile's rates beside the sheet's peaks and, where the driver did not tell, its watts."""
    if card is None:
        return machine
    sheet = machine_of_card(card)
    return replace(
        machine,
        name=card.name,
        peak_flops=sheet.peak_flops,
        watts=machine.watts or sheet.watts,
        product_flops={**sheet.product_flops, **machine.product_flops},
    )


def _this_cpu(run: Run) -> tuple[Machine, Target, list[str]]:
    set_threads(run.compute.threads, 1)
    device = torch.device("cpu")
    found = find_profile(key_of(device))
    memory = int(str(hardware.describe(device, torch.float32)["memory_bytes"]))
    target = Target(kind="cpu", name=hardware.cpu_name(), memory_bytes=memory)
    if found is not None:
        notes = [f"the profile is stale ({', '.join(found[1])}): run `penjing profile`"] if found[1] else []
        return found[0].machine(), target, notes
    own = str(hardware.compute_dtype(run.compute.dtype, device)).removeprefix("torch.")
    rate = product(512, 512, 512, own, device, tries=3)["flops_per_second"]
    machine = Machine(
        name=hardware.cpu_name(),
        kind="cpu",
        level="L0",
        source="a moment's measurement",
        product_flops={own: rate},
        attention_share=min(1.0, attention_rate(own, device) / rate),
        bytes_per_second=copy_rate(device),
        launch_seconds=launch_seconds(device),
        memory_bytes=memory,
        peak_flops={own: rate},
    )
    return machine, target, ["no profile of this machine: `penjing profile` halves the interval"]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What one unit of a batch (row, pair, prompt) is taken to hold where there are no data to look at."""

    tokens: float  # positions of its forward pass
    keys: float  # that a query sees on average
    extra_forwards: float = 0.0
    note: str = ""


def lengths_of(run: Run) -> Lengths:
    """Full rows, the most there can be, and for answers half of the longest."""
    row = run.data.row_tokens
    objective = run.objective
    if isinstance(objective, Policy):
        how = objective.rollout
        prompt, answer = (row - how.max_tokens) / 2, how.max_tokens / 2
        extra = float(objective.kl_weight > 0) + float(how.behaviour == "recomputed")
        note = f"prompts are taken to have {prompt:.0f} tokens and answers {answer:.0f}, half of the most"
        return Lengths(tokens=prompt + how.answers * answer, keys=prompt + answer / 2, extra_forwards=extra, note=note)
    if isinstance(objective, Preference):
        with_reference = objective.loss not in WITHOUT_REFERENCE and objective.reference == "copy"
        return Lengths(
            tokens=row, keys=(row + 1) / 2, extra_forwards=float(with_reference), note="every pair fills its row"
        )
    extra = 1.0 if isinstance(objective, Distill) else 0.0
    note = "the teacher is taken to be as large as the student" if extra else ""
    return Lengths(tokens=row, keys=(row + 1) / 2, extra_forwards=extra, note=note)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How long to train, and why so."""

    steps: int
    tokens: int
    unique: int  # 0 = not known
    reason: str

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique if self.unique else 1.0


def amount_of(run: Run, asked: Asked, lengths: Lengths, shape: Shape) -> Amount:
    """Steps and tokens: as the command line says, as the settings say, or compute-optimal."""
    each = lengths.tokens * run.batch.rows
    unique = cost.read_count(asked.unique, "--unique") if asked.unique else 0
    if asked.tokens and asked.tokens != "auto":
        total, reason = cost.read_count(asked.tokens, "--tokens"), "as asked"
    elif run.steps:
        total, reason = round(run.steps * each), f"steps={run.steps}"
    elif unique:
        total, reason = round(run.epochs * unique), f"{run.epochs:g} epochs of --unique"
    elif run.data.kind == "documents":
        advice = tokens.advise(shape.parameters, shape.matrices)
        total, reason = round(advice.tokens), "no data given: compute-optimal for this size"
    else:
        total, reason = round(STEPS_UNSAID * each), f"no data given: {STEPS_UNSAID} steps for the sake of the example"
    return Amount(steps=max(1, math.ceil(total / each)), tokens=total, unique=unique, reason=reason)


def _with_batch_of_data(run: Run, asked: Asked, lengths: Lengths) -> Run:
    """The run with the batch that training takes of so much data."""
    if not asked.unique:
        return run
    unique, total = cost.read_count(asked.unique, "--unique"), asked.tokens not in ("", "auto")
    epochs = cost.read_count(asked.tokens, "--tokens") / unique if total else run.epochs
    units_per_epoch = max(1, round(unique / lengths.tokens))
    return replace(run, batch=fit_batch(replace(run, epochs=epochs), units_per_epoch, asked.gpus).batch)


def workload_of(
    run: Run,
    shape: Shape,
    lengths: Lengths,
    machine: Machine,
    *,
    micro_rows: int,
    asked: Asked,
    adapters: int,
    steps: int = 0,
) -> Workload:
    """The run's step on one of the devices. steps: of the whole run, which say whether compiling pays."""
    dtype = _dtype(run, machine)
    engine = asked.engine or ("ddp" if asked.gpus > 1 else "single")
    eager = Workload(
        shape=shape,
        tokens=max(1, round(micro_rows * lengths.tokens)),
        row_tokens=run.data.row_tokens,
        keys=lengths.keys,
        passes=max(1, run.batch.rows // (micro_rows * asked.gpus)),
        dtype=dtype,
        optimizer=run.optimizer.kind,
        fused_optimizer=True,
        own_kernels=machine.kind == "cuda" and dtype == "bfloat16",  # cards that have it have the kernels
        recompute=run.compute.recompute,
        ranks=asked.gpus,
        sharding=SHARDINGS[engine],  # type: ignore[arg-type]  # from the table
        adapters=adapters,
        extra_forwards=lengths.extra_forwards,
    )
    return replace(eager, compiled=_compiled(run, machine, steps * step_time(eager, machine).seconds))


def _compiled(run: Run, machine: Machine, eager_seconds: float) -> bool:
    """Whether the run would be compiled, as parallel/compile.py decides; on a CPU only if asked for."""
    setting = run.compute.compile
    if setting == "off" or run.no_static_graph or (run.model.is_mixture and machine.kind != "cuda"):
        return False
    if setting != "auto":
        return True
    saved = eager_seconds * (1 - 1 / GAIN[machine.kind])
    return machine.kind == "cuda" and saved > WORTH * COST_SECONDS[machine.kind]


def _dtype(run: Run, machine: Machine) -> str:
    if run.compute.dtype != "auto":
        return run.compute.dtype
    if machine.kind == "cpu":
        return str(hardware.compute_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    card = card_called(machine.name)
    return "bfloat16" if card is None or card.has_bfloat16 else "float16"


def make_page(what: str, run: Run, asked: Asked, foreign: Shape | None = None) -> Page:
    """The whole page from settings alone. foreign: the shape of a model that we do not train; its memory is a formula.

    Raises UserError for bad input.
    """
    budget = cost.read_budget(asked.budget) if asked.budget else cost.Budget()
    machine, target, warnings = find_machine(asked, run)
    if budget.memory_bytes:
        target = replace(target, memory_bytes=min(budget.memory_bytes, target.memory_bytes or budget.memory_bytes))
    shape = foreign or shape_of(run.model)
    lengths = lengths_of(run)
    run = _with_batch_of_data(run, asked, lengths)
    amount = amount_of(run, asked, lengths, shape)
    wanted, adapters = pass_rows(run, machine.kind, asked.gpus), adapters_of(run)
    fitted = None if foreign is not None else _memory(run, target, asked, wanted)
    micro = fitted.micro_rows if fitted else wanted
    memory = fitted.plan if fitted else None
    work = workload_of(
        run, shape, lengths, machine, micro_rows=micro, asked=asked, adapters=adapters, steps=amount.steps
    )
    step = step_time(work, machine)
    parts, generation = _parts(run, step, work, machine, lengths, amount, asked)
    seconds = sum(parts.values())
    low, high = interval(seconds, MARGINS[machine.level])
    causal, full = _flops(run, shape, lengths, adapters, foreign)
    per_step = round(run.batch.rows * lengths.tokens)
    busy = parts["training"] / amount.steps
    rate = per_step / busy
    peak = machine.peak_flops.get(work.dtype)
    total_bytes = memory.total_bytes if memory else round(_foreign_memory(shape, work))
    room = target.memory_bytes
    fits = (total_bytes <= room) if room else None
    if fitted:
        warnings += fitted.notes
        warnings += [said] if asked.engine and (said := not_run(asked.engine)) else []
    if run.compute.float8 != "off":
        warnings.append("time is that of bfloat16: what float8 gains is not predicted")
    if lengths.note:
        warnings.append(f"without data {lengths.note}")
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
        disk_checkpoint_bytes=round((4 * shape.parameters if not adapters else 0) + 12 * adapters)
        + (0 if adapters else run.optimizer.state_bytes * shape.parameters),
        cost=str(spent) if spent else "",
        price=f"{price.hour} an hour, {price.source}" if price else "",
        kilowatt_hours=cost.kilowatt_hours(seconds, asked.gpus, machine.watts, hardware.physical_cores()),
        advice=_advice(run, shape, amount),
        alternatives=_alternatives(run, asked, machine, shape, lengths, fitted, work, seconds),
        warnings=warnings,
        formulas=_formulas(shape, work, machine, step, amount, causal, full),
        over_budget=_over(budget, seconds, spent, total_bytes),
    )
    return page


def adapters_of(run: Run) -> int:
    """Parameters of the adapters, of every matrix of the blocks: an estimate for other targets. 0: there are none."""
    model = run.model
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    sides = 2 * (model.hidden_size + queries) + 2 * (model.hidden_size + keys)
    sides += 3 * (model.hidden_size + model.mlp_size)
    return run.lora.rank * sides * model.num_layers


def _flops(run: Run, shape: Shape, lengths: Lengths, adapters: int, foreign: Shape | None) -> tuple[float, float]:
    """Per token, causal and full square."""
    if foreign is not None:
        per_key, windows = 12.0 * shape.query_size, shape.windows or (0,) * shape.layers
        keys, square = sum(windowed_keys(lengths.keys, each) for each in windows), shape.layers * run.data.row_tokens
        return 6.0 * shape.matrices + per_key * keys, 6.0 * shape.matrices + per_key * square
    how: dict[str, Any] = {"adapters": adapters, "extra_forwards": lengths.extra_forwards, "frozen": adapters > 0}
    square = run.data.row_tokens
    return (
        training_flops_per_token(run.model, lengths.keys, **how),
        training_flops_per_token(run.model, square, window_keys=square, **how),
    )


def _parts(
    run: Run, step: StepTime, work: Workload, machine: Machine, lengths: Lengths, amount: Amount, asked: Asked
) -> tuple[dict[str, float], float]:
    """Seconds of the run by part, and of one step's share of sampling answers."""
    generation = 0.0
    objective = run.objective
    if isinstance(objective, Policy):
        how = objective.rollout
        prompts = max(1, run.batch.rows * how.updates // asked.gpus)
        decode = Decode(
            answers=prompts * how.answers,
            prompt_tokens=(run.data.row_tokens - how.max_tokens) / 2,
            answer_tokens=how.max_tokens / 2,
            longest=how.max_tokens,
            slots=how.slots or (64 if machine.kind == "cpu" else 256),
        )
        generation = decode_time(decode, work, machine) / (how.updates * how.repeats)
    forward = (step.products + step.attention + step.elementwise + step.head) / 3 / max(1, work.tokens * work.passes)
    validations = math.ceil(amount.steps / run.validate.every) if run.validate.every else 0
    saved = 12 * work.trained
    checkpoints = math.ceil(amount.steps / run.save.every)
    return {
        "training": amount.steps * (step.seconds + generation),
        "validation": validations * run.validate.rows * lengths.tokens * forward / asked.gpus,
        "checkpoint": checkpoints * (0.02 + saved / WRITE_RATE),
        "start-up": START_SECONDS,
        "compile": COST_SECONDS[machine.kind] if work.compiled else 0.0,
    }, generation


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The traced memory of a step with so many rows in a pass, and the most that would fit."""

    plan: MemoryPlan
    micro_rows: int
    largest: int  # about; 0 = not known
    slope: float  # bytes of each row, up to the rows that were wanted
    notes: list[str]
    fits: Callable[[int], bool]  # whether a pass of so many rows does, traced


def _memory(run: Run, target: Target, asked: Asked, wanted: int) -> Fitted:
    """Trace the step as the settings have it; if it does not fit and they leave it open, with as many rows as do."""
    from penjing.train.trace import predict_memory  # slow to import, and not every page traces

    engine: Engine = asked.engine or ("ddp" if asked.gpus > 1 else "single")
    known: dict[int, MemoryPlan] = {}

    def at(rows: int) -> MemoryPlan:
        if rows not in known:
            known[rows] = predict_memory(run, target, micro_rows=rows, ranks=asked.gpus, engine=engine)
        return known[rows]

    plan, share, rows = at(wanted), run.batch.rows // asked.gpus, wanted
    less = next((each for each in _divisors(share) if each < wanted), 0)
    slope = (plan.total_bytes - at(less).total_bytes) / (wanted - less) if less else 0.0
    notes = [note for note in plan.notes if "every position" not in note]
    room = safe_bytes(target.memory_bytes)
    if room and plan.total_bytes > room and not run.batch.micro_rows:
        line = wanted - (plan.total_bytes - room) / max(1.0, slope)
        rows = next((each for each in _divisors(wanted) if each <= line), 1)
        while at(rows).total_bytes > room and rows > 1:
            rows = next(each for each in _divisors(wanted) if each < rows)
        if at(rows).total_bytes > target.memory_bytes:
            rows = wanted
        elif rows < wanted:
            same = "the same gradients" if run.passes_are_exact else "the routers' balance loss is taken over each"
            notes.append(
                f"{wanted} rows in one pass take {units.gibibytes(plan.total_bytes)}; "
                f"planned with batch.micro_rows={rows} in {share // rows} passes: {same}"
            )
    most = MOST_LOGITS // (run.data.row_tokens * run.model.vocabulary_size)
    return Fitted(
        plan=at(rows),
        micro_rows=rows,
        largest=_largest(known, at, slope, room, most) if room and less else 0,
        slope=slope,
        notes=notes,
        fits=lambda each: at(each).total_bytes <= room,
    )


def _largest(
    known: Mapping[int, MemoryPlan], at: Callable[[int], MemoryPlan], slope: float, room: int, most: int
) -> int:
    """About how many rows fit in one pass, at most `most`; 0 if none of those that were traced do.

    Memory is the highest of several lines in the rows: the optimizer's peak stays, that of activations grows. Between
    two traced numbers it is at most on the line through them; beyond them it may be far above. So where that line
    leaves the room is traced too.
    """
    good = max((rows for rows, plan in known.items() if plan.total_bytes <= room), default=0)
    if not good:
        return 0
    if good == max(known):
        further = (room - known[good].total_bytes) / max(1.0, slope)
        beyond = min(good + math.floor(further), max(good, most))
        if at(beyond).total_bytes <= room:
            return beyond
    bad = min(rows for rows in known if rows > good)
    share = (room - known[good].total_bytes) / (known[bad].total_bytes - known[good].total_bytes)
    return good + math.floor((bad - good) * share)


def _divisors(number: int) -> list[int]:
    """Largest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]


def _foreign_memory(shape: Shape, work: Workload) -> float:
    """A formula: states of 16 bytes a parameter, of which devices that share them hold a part each, activations by
    width, whole logits, and a context."""
    whole = WHOLE_BYTES.get(work.sharding, 16.0)
    states = (whole + (16.0 - whole) / work.ranks) * shape.parameters
    layers = shape.layers * work.tokens * (34 * shape.width + 4 * shape.mlp_size)
    return states + layers + 12.0 * work.tokens * shape.vocabulary + 0.5 * 2**30


def _advice(run: Run, shape: Shape, amount: Amount) -> list[str]:
    """How many tokens, in which batch and at which rate others would train."""
    best = tokens.advise(shape.parameters, shape.matrices)
    ratio = amount.tokens / shape.parameters
    law = tokens.LAWS["corrected"]
    lines = []
    if run.data.kind == "documents":
        lines.append(
            f"compute-optimal: {units.count(best.tokens)} tokens ({units.count(best.low)} to "
            f"{units.count(best.high)}), "
            f"{best.tokens / shape.parameters:.0f} for each of all {units.count(shape.parameters)} parameters; by "
            f"matrices and head alone, {tokens.MATRICES_RATIO} x {units.count(shape.matrices)} = "
            f"{units.count(best.by_matrices)}"
        )
        gains = []
        base = law.loss(shape.parameters, amount.tokens)
        for each in tokens.RATIOS:
            if each > 1.2 * ratio:
                gain = base - law.loss(shape.parameters, each * shape.parameters)
                gains.append(f"{each} per parameter -{gain:.2f} nats for {each / ratio:.1f} x the time")
        if gains:
            lines.append("training longer: " + ", ".join(gains))
        embedding = shape.vocabulary * shape.width
        checks = tokens.cross_checks(
            shape.parameters - embedding, amount.tokens, 6.0 * shape.parameters * amount.tokens
        )
        batch = run.batch.rows * run.data.row_tokens
        said = "; ".join(
            f"{check.rule.split(' (')[0]} {units.count(float(round(check.batch_tokens)))} tokens"
            + (f", rate {check.learning_rate:.1e}" if check.learning_rate else "")
            for check in checks
        )
        rate = f"rate {run.optimizer.learning_rate:.1e}"
        if isinstance(run.optimizer, Muon):
            rate = f"Muon at {rate}, AdamW at {run.optimizer.adamw_learning_rate:.1e}"
        lines.append(f"batch {units.count(batch)} tokens, {rate}; others would take, with AdamW, {said}")
    return lines


def _alternatives(
    run: Run,
    asked: Asked,
    machine: Machine,
    shape: Shape,
    lengths: Lengths,
    fitted: Fitted | None,
    work: Workload,
    seconds: float,
) -> list[str]:
    """Three changes that would help most, each with what it would give at the same rates."""
    found: list[tuple[float, str]] = []
    if fitted:
        share = run.batch.rows // asked.gpus
        for rows in _divisors(share):
            if not fitted.micro_rows < rows <= fitted.largest:
                continue
            other = replace(work, tokens=round(rows * lengths.tokens), passes=share // rows)
            gain = 1 - step_time(other, machine).seconds / step_time(work, machine).seconds
            if gain > 0.005 and fitted.fits(rows):
                found.append((gain, f"batch.micro_rows={rows}: {gain:.0%} faster, and fits"))
                break
        rows = next((each for each in _divisors(share) if each < fitted.micro_rows), 0)
        if rows and fitted.slope > 0:
            saved = fitted.slope * (fitted.micro_rows - rows)
            other = replace(work, tokens=round(rows * lengths.tokens), passes=share // rows)
            slower = step_time(other, machine).seconds / step_time(work, machine).seconds - 1
            say = f"batch.micro_rows={rows}: {units.gibibytes(saved)} less memory, {slower:.1%} slower"
            found.append((0.02 if fitted.plan.fits is not False else 1.0, say))
    if not work.compiled and machine.kind == "cuda":
        gain = 1 - step_time(replace(work, compiled=True), machine).seconds / step_time(work, machine).seconds
        found.append((gain, f"a compiled step: {gain:.0%} faster by formula (estimate)"))
    if machine.kind == "cuda" and asked.gpus == 1:
        for name in ("RTX 4090", "A100", "H100"):
            other_machine = machine_of_card(find_card(name))
            if other_machine.name == machine.name:
                continue
            gain = 1 - step_time(work, other_machine).seconds / step_time(work, machine).seconds
            if gain > 0.1:
                price = cost.price_of(name)
                money = f", {cost.cost(price, seconds * (1 - gain), 1)}" if price else ""
                found.append((gain / 4, f"--gpu {name!r}: {units.duration(seconds * (1 - gain))}{money} (L0)"))
                break
    more = 2 * asked.gpus
    halved = work.passes % 2 == 0
    if machine.kind == "cuda" and run.batch.rows % more == 0 and (halved or not run.batch.micro_rows):
        shared = replace(
            work,
            ranks=more,
            sharding="ddp" if work.sharding == "none" else work.sharding,
            passes=work.passes // 2 if halved else work.passes,
            tokens=work.tokens if halved else max(1, work.tokens // 2),
        )
        gain = 1 - step_time(shared, machine).seconds / step_time(work, machine).seconds
        if gain > 0.02:
            found.append((gain / 8, f"--gpus {more}: {units.duration(seconds * (1 - gain))} ({gain:.0%} less)"))
    doubled = run.batch.rows * 2
    fewer = replace(work, passes=work.passes * 2)
    gain = 1 - step_time(fewer, machine).seconds / (2 * step_time(work, machine).seconds)
    if gain > 0.02:
        found.append(
            (gain, f"batch.rows={doubled}: {gain:.0%} less time for the same tokens; learns in fewer, larger steps")
        )
    found.sort(key=lambda pair: -pair[0])
    return [line for _, line in found[:3]]


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


def timed_page(what: str, run: Run, asked: Asked) -> tuple[Page, float]:
    """The page, and how long it took."""
    start = time.perf_counter()
    return make_page(what, run, asked), time.perf_counter() - start


def model_of(count: int) -> ModelConfig:
    """A model of ours with about so many parameters: the nearest rung of the ladder, which ends at 3B."""
    count = min(count, 3_000_000_000)
    size = f"{max(1, round(count / 1e6))}m" if count >= 1e6 else f"{max(500, round(count / 1e3))}k"
    return config.resolve(ModelConfig, {"preset": f"ladder-{size}"})
