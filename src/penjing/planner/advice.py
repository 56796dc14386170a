"""Advice of a plan: tokens, batch size and learning rate by published rules; faster or smaller settings."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from penjing.base import formatting as units
from penjing.optim.muon import Muon
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan.device_model import Machine, machine_from_spec
from penjing.plan.gpu_specs import find_gpu_spec
from penjing.plan.layout import NODE_RANKS
from penjing.plan.memory import safe_bytes
from penjing.plan.shape import Shape
from penjing.plan.step_workload import Workload
from penjing.planner.fit import Fitted
from penjing.planner.inputs import TokenBudget, accepted, busy_seconds, lengths_of
from penjing.train.batch_geometry import micro_sizes
from penjing.train.config import Run
from penjing.train.memory_trace.fit import layout_of
from penjing.train.resolve import with_settings

SUGGESTED_GPUS = ("RTX 4090", "A100", "H100")
LARGE_GPUS = (*SUGGESTED_GPUS, "H200", "B200")  # for what fits no other
MIN_SEQ_LEN = 128  # of what is suggested to save memory
NEARBY, MAX_NEARBY_TRACES = 1 / 8, 3  # fraction by which an advised batch may differ; sizes that are traced for it
MAX_NEARBY_SHARES = 1024  # batches of a wider range are tried in steps
Suggestion = tuple[float, str]  # gain for sorting, and text


def advice(run: Run, shape: Shape, amount: TokenBudget) -> list[str]:
    """Tokens, batch and learning rate by published rules."""
    if run.data.format != "documents":
        return []
    count, size, law = units.count, shape.parameters, tokens.LAWS["corrected"]
    best = tokens.advise(size, shape.matrices)
    lines = [
        f"compute-optimal: {count(best.tokens)} tokens ({count(best.low)} to {count(best.high)}), "
        f"{best.tokens / size:.0f} per parameter of {count(size)}; counting matrices and head only, "
        f"{tokens.MATRIX_RATIO} x {count(shape.matrices)} = {count(best.by_matrices)}"
    ]

    def loss(total: float) -> float:
        return law.loss(size, tokens.repeated_tokens(amount.unique, total / amount.unique) if amount.unique else total)

    ratio, base = amount.tokens / size, loss(amount.tokens)
    gains = [
        f"{each} per parameter -{base - loss(each * size):.2f} nats for {each / ratio:.1f} x the time"
        for each in tokens.TOKEN_RATIOS
        if each > 1.2 * ratio
    ]
    if gains and base < math.log(shape.vocabulary):  # above the loss of guessing the law does not hold
        lines.append("training longer: " + ", ".join(gains))
    embedding = shape.vocabulary * shape.width
    rules = "; ".join(
        f"{rule} {count(float(round(batch)))} tokens" + (f", rate {rate:.1e}" if rate else "")
        for rule, batch, rate in tokens.cross_checks(size - embedding, amount.tokens, 6.0 * size * amount.tokens)
    )
    rate = f"rate {run.optimizer.learning_rate:.1e}"
    if isinstance(run.optimizer, Muon):
        rate = f"Muon at {rate}, AdamW at {run.optimizer.adamw_learning_rate:.1e}"
    batch = count(run.batch.size * run.data.seq_len)
    return [*lines, f"batch {batch} tokens, {rate}; published rules for AdamW: {rules}"]


def expected_loss(run: Run, shape: Shape, amount: TokenBudget) -> float | None:
    """Nats per token by the corrected law for its authors' texts; None where it does not hold."""
    if run.data.format != "documents":
        return None
    worth = tokens.repeated_tokens(amount.unique, amount.epochs) if amount.unique else amount.tokens
    loss = tokens.LAWS["corrected"].loss(shape.parameters, worth)
    holds = worth >= tokens.LAW_FROM_TOKENS and loss < math.log(shape.vocabulary)  # the loss of guessing
    return loss if holds else None


@dataclass(frozen=True, kw_only=True)
class _CurrentPlan:
    """The run with its current settings."""

    run: Run
    machine: Machine
    work: Workload
    seconds: float  # of the full run

    def accepts(self, run: Run) -> bool:
        """Whether training accepts these settings on the same devices."""
        return accepted(run, self.machine, self.work.ranks)

    def with_rows(self, rows: int, size: int = 0) -> tuple[Run, Workload]:
        """The run and its workload with another micro-batch, and perhaps another batch size."""
        size = size or self.run.batch.size
        run = with_settings(self.run, {"batch.size": size, "batch.micro_size": rows})
        tokens = round(rows * lengths_of(self.run).tokens)
        return run, replace(self.work, tokens=tokens, passes=size // (rows * self.work.ranks))

    def gain(self, run: Run, work: Workload, machine: Machine | None = None, steps: float = 1.0) -> float:
        """Fraction of time saved, including generation. steps: current steps that one new step replaces."""
        current_seconds = busy_seconds(self.run, self.work, self.machine)
        return 1 - busy_seconds(run, work, machine or self.machine) / (steps * current_seconds)


def alternatives(run: Run, machine: Machine, fitted: Fitted | None, work: Workload, seconds: float) -> list[str]:
    """The three most helpful changes that training accepts for this run, with their predicted gains; for a run that
    does not fit, what would."""
    current = _CurrentPlan(run=run, machine=machine, work=work, seconds=seconds)
    if fitted and fitted.passes.limit and not fitted.passes.fits(fitted.micro_size):
        return what_fits(current, fitted)
    suggestions = [
        *(_passes(current, fitted) if fitted else ()),
        *(_nearby_batch(current, fitted) if fitted else ()),
        *_faster_gpus(current, fitted),
        *_more_gpus(current),
        *_larger_batch(current, fitted),
    ]
    suggestions.sort(key=lambda pair: -pair[0])
    return [line for _, line in suggestions[:3]]


def _passes(current: _CurrentPlan, fitted: Fitted) -> Iterator[Suggestion]:
    """A larger micro-batch, if it fits and is faster."""
    for rows in fitted.passes.geometry.micro_sizes:
        if fitted.micro_size < rows <= fitted.largest:
            run, work = current.with_rows(rows)
            gain = current.gain(run, work)
            if current.accepts(run) and gain > 0.005 and fitted.passes.fits(rows):
                yield gain, f"batch.micro_size={rows}: {gain:.0%} faster, and fits"
                break


def _nearby_batch(current: _CurrentPlan, fitted: Fitted) -> Iterator[Suggestion]:
    """A batch of about the same size whose share of a device has larger divisors that fit."""
    batch, ranks, geometry = current.run.batch, current.work.ranks, fitted.passes.geometry
    if fitted.micro_size >= geometry.micro_size:
        return
    candidates = []
    low, high = math.ceil(batch.size * (1 - NEARBY) / ranks), int(batch.size * (1 + NEARBY) / ranks)
    for share in range(low, high + 1, max(1, (high - low) // MAX_NEARBY_SHARES)):
        rows = next((size for size in micro_sizes(share, geometry.indivisible) if size <= fitted.largest), 0)
        if rows > fitted.micro_size:
            gain = current.gain(*current.with_rows(rows, share * ranks), steps=share * ranks / batch.size)
            candidates.append((round(gain, 2), -abs(share * ranks - batch.size), rows, share * ranks))
    for gain, _, rows, size in sorted(candidates, reverse=True)[:MAX_NEARBY_TRACES]:
        run, _ = current.with_rows(rows, size)
        if gain >= 0.05 and current.accepts(run) and fitted.passes.of(run).fits(rows):
            faster = f"{gain:.0%} less time for the same tokens, {units.duration(current.seconds * (1 - gain))}"
            yield gain, f"batch.size={size}: {faster}, with micro-batches of {rows} instead of {fitted.micro_size}"
            return


def what_fits(current: _CurrentPlan, fitted: Fitted) -> list[str]:
    """For a run that does not fit: a micro-batch with which it does, or that there is none, and what else would fit."""
    run, passes = current.run, fitted.passes
    sizes = [size for size in passes.geometry.micro_sizes if size <= passes.full]
    smallest = sizes[-1]
    least = passes.plan(smallest).total_bytes
    if least <= passes.limit:
        rows = next(size for size in sizes if passes.fits(size))
        run, work = current.with_rows(rows)
        slower = replace(current, run=run, work=work, seconds=current.seconds * (1 - current.gain(run, work)))
        nearby = _nearby_batch(slower, replace(fitted, micro_size=rows, largest=fitted.largest or passes.largest()))
        return [f"batch.micro_size={rows}: fits", *(line for _, line in nearby)]
    lines = [f"no micro-batch fits: the smallest, {smallest}, takes {units.gibibytes(least)}"]
    variants = ((change, variant) for change, variant in _smaller_runs(run) if passes.of(variant).fits(smallest))
    lines += [f"{change}: fits, with micro-batches of {smallest}" for change, variant in islice(variants, 1)]
    for name in () if current.machine.on_host else LARGE_GPUS:
        other = machine_from_spec(find_gpu_spec(name))
        if least <= safe_bytes(other.memory_bytes) and accepted(run, other, current.work.ranks):
            return [*lines, f"--gpu {name!r}: fits, with micro-batches of at least {smallest}"]
    share = passes.limit / least
    return [*lines, f"a model of about {units.count(round(share * current.work.shape.parameters, -5))} parameters fits"]


def _smaller_runs(run: Run) -> Iterator[tuple[str, Run]]:
    """The run with settings that take less memory on the same device, ever more of them."""
    changes = []
    if run.compute.activation_checkpointing != "block" and not run.model.is_mixture and not run.lora.dropout:
        changes.append("compute.activation_checkpointing=block")
        run = with_settings(run, {"compute.activation_checkpointing": "block"})
        yield " ".join(changes), run
    if run.optimizer.state_dtype != "int8":
        changes.append("optimizer.state_dtype=int8")
        run = with_settings(run, {"optimizer.state_dtype": "int8"})
        yield " ".join(changes), run
    while run.data.seq_len >= 2 * MIN_SEQ_LEN and run.objective.sampling is None:
        run = with_settings(run, {"data.seq_len": run.data.seq_len // 2})
        yield " ".join([*changes, f"data.seq_len={run.data.seq_len}"]), run


def _faster_gpus(current: _CurrentPlan, fitted: Fitted | None) -> Iterator[Suggestion]:
    """A faster GPU with enough memory."""
    if current.machine.on_host or current.work.ranks > 1:
        return
    for name in SUGGESTED_GPUS:
        other = machine_from_spec(find_gpu_spec(name))
        fits = fitted is None or fitted.plan.total_bytes <= safe_bytes(other.memory_bytes)
        if other.name == current.machine.name or not fits or not accepted(current.run, other, 1):
            continue
        gain = current.gain(current.run, current.work, other)
        if gain > 0.1:
            price = cost.price_of(name)
            money = f", {cost.cost(price, current.seconds * (1 - gain), 1)}" if price else ""
            yield gain / 4, f"--gpu {name!r}: {units.duration(current.seconds * (1 - gain))}{money} (L0)"
            return


def _more_gpus(current: _CurrentPlan) -> Iterator[Suggestion]:
    more, work = 2 * current.work.ranks, current.work
    halved = work.passes % 2 == 0
    shares = current.run.parallel.strategy != "single"  # a setting for one process
    if current.machine.on_host or not shares or not accepted(current.run, current.machine, more):
        return
    if not halved and current.run.batch.micro_size:
        return
    shared = replace(
        work,
        layout=layout_of(current.run.parallel, more, -(-more // NODE_RANKS)),
        passes=work.passes // 2 if halved else work.passes,
        tokens=work.tokens if halved else max(1, work.tokens // 2),
    )
    gain = current.gain(current.run, shared)
    if gain > 0.02:
        yield gain / 8, f"--gpus {more}: {units.duration(current.seconds * (1 - gain))} ({gain:.0%} less)"


def _larger_batch(current: _CurrentPlan, fitted: Fitted | None) -> Iterator[Suggestion]:
    """Twice the batch, in micro-batches of twice the rows if they fit, otherwise in twice the micro-batches."""
    size = 2 * current.run.batch.size
    run = with_settings(current.run, {"batch.size": size})
    work = replace(current.work, passes=current.work.passes * 2)
    if fitted and not current.run.batch.micro_size:
        rows = 2 * fitted.micro_size
        if rows <= fitted.largest or (not fitted.largest and fitted.passes.fits(rows)):
            _, work = current.with_rows(rows, size)
    gain = current.gain(run, work, steps=2.0)
    if current.accepts(run) and gain > 0.02:
        yield gain, f"batch.size={size}: {gain:.0%} less time for the same tokens; learns in fewer, larger steps"
