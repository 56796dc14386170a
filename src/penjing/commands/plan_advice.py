"""Advice of a plan: tokens, batch size and learning rate by published rules; faster or smaller settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penjing.base import formatting as units
from penjing.commands.plan_fit import Fitted, divisors
from penjing.commands.plan_run import TokenBudget, accepted, generation_seconds, lengths_of
from penjing.optim.muon import Muon
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan.device_model import Machine, machine_from_spec
from penjing.plan.gpu_specs import find_gpu_spec
from penjing.plan.memory import safe_bytes
from penjing.plan.shape import Shape
from penjing.plan.step_time import step_time
from penjing.plan.step_workload import Workload
from penjing.train.compile_policy import choose
from penjing.train.config import Run

SUGGESTED_GPUS = ("RTX 4090", "A100", "H100")
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
    ratio, base = amount.tokens / size, law.loss(size, amount.tokens)
    gains = [
        f"{each} per parameter -{base - law.loss(size, each * size):.2f} nats for {each / ratio:.1f} x the time"
        for each in tokens.TOKEN_RATIOS
        if each > 1.2 * ratio
    ]
    if gains:
        lines.append("training longer: " + ", ".join(gains))
    embedding = shape.vocabulary * shape.width
    rules = "; ".join(
        f"{check.rule.split(' (')[0]} {count(float(round(check.batch_tokens)))} tokens"
        + (f", rate {check.learning_rate:.1e}" if check.learning_rate else "")
        for check in tokens.cross_checks(size - embedding, amount.tokens, 6.0 * size * amount.tokens)
    )
    rate = f"rate {run.optimizer.learning_rate:.1e}"
    if isinstance(run.optimizer, Muon):
        rate = f"Muon at {rate}, AdamW at {run.optimizer.adamw_learning_rate:.1e}"
    batch = count(run.batch.size * run.data.seq_len)
    return [*lines, f"batch {batch} tokens, {rate}; published rules for AdamW: {rules}"]


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

    def gain(self, run: Run, work: Workload, machine: Machine | None = None, steps: float = 1.0) -> float:
        """Fraction of time saved, including generation. steps: current steps that one new step replaces."""
        current_seconds = _step_seconds(self.run, self.work, self.machine)
        return 1 - _step_seconds(run, work, machine or self.machine) / (steps * current_seconds)


def _step_seconds(run: Run, work: Workload, machine: Machine) -> float:
    return step_time(work, machine).seconds + generation_seconds(run, work, machine)


def alternatives(run: Run, machine: Machine, fitted: Fitted | None, work: Workload, seconds: float) -> list[str]:
    """The three most helpful changes that training accepts for this run, with their predicted gains."""
    current = _CurrentPlan(run=run, machine=machine, work=work, seconds=seconds)
    suggestions = [
        *(_passes(current, fitted) if fitted else ()),
        *_compiled(current),
        *_faster_gpus(current, fitted),
        *_more_gpus(current),
        *_larger_batch(current),
    ]
    suggestions.sort(key=lambda pair: -pair[0])
    return [line for _, line in suggestions[:3]]


def _passes(current: _CurrentPlan, fitted: Fitted) -> Iterator[Suggestion]:
    """A larger micro-batch, if it fits and is faster; a smaller one to save memory."""
    share, tokens_each = current.run.batch.size // current.work.ranks, lengths_of(current.run).tokens

    def with_rows(rows: int) -> tuple[Run, Workload]:
        run = replace(current.run, batch=replace(current.run.batch, micro_size=rows))
        return run, replace(current.work, tokens=round(rows * tokens_each), passes=share // rows)

    possible = [rows for rows in divisors(share) if current.accepts(with_rows(rows)[0])]
    for rows in possible:
        if fitted.micro_size < rows <= fitted.largest:
            gain = current.gain(*with_rows(rows))
            if gain > 0.005 and fitted.fits(rows):
                yield gain, f"batch.micro_size={rows}: {gain:.0%} faster, and fits"
                break
    rows = next((each for each in possible if each < fitted.micro_size), 0)
    if rows and fitted.bytes_per_row > 0:
        saved, slower = fitted.bytes_per_row * (fitted.micro_size - rows), max(0.0, -current.gain(*with_rows(rows)))
        line = f"batch.micro_size={rows}: {units.gibibytes(saved)} less memory, {slower:.1%} slower"
        yield (0.02 if fitted.plan.fits is not False else 1.0), line


def _compiled(current: _CurrentPlan) -> Iterator[Suggestion]:
    """torch.compile, if it is off and `auto` would turn it on."""
    run = replace(current.run, compute=replace(current.run.compute, compile="blocks"))
    if current.run.compute.compile != "off" or not current.accepts(run):
        return
    if choose("auto", current.machine.kind, "", current.seconds).how != "off":
        gain = current.gain(run, replace(current.work, compiled=True))
        yield gain, f"compute.compile=auto: {gain:.0%} faster by formula (estimate)"


def _faster_gpus(current: _CurrentPlan, fitted: Fitted | None) -> Iterator[Suggestion]:
    """A faster GPU with enough memory."""
    if current.machine.kind != "cuda" or current.work.ranks > 1:
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
    if current.machine.kind != "cuda" or not accepted(current.run, current.machine, more):
        return
    if not halved and current.run.batch.micro_size:
        return
    shared = replace(
        work,
        ranks=more,
        sharding="ddp" if work.sharding == "none" else work.sharding,
        passes=work.passes // 2 if halved else work.passes,
        tokens=work.tokens if halved else max(1, work.tokens // 2),
    )
    gain = current.gain(current.run, shared)
    if gain > 0.02:
        yield gain / 8, f"--gpus {more}: {units.duration(current.seconds * (1 - gain))} ({gain:.0%} less)"


def _larger_batch(current: _CurrentPlan) -> Iterator[Suggestion]:
    rows = current.run.batch.size * 2
    run = replace(current.run, batch=replace(current.run.batch, size=rows))
    gain = current.gain(run, replace(current.work, passes=current.work.passes * 2), steps=2.0)
    if current.accepts(run) and gain > 0.02:
        yield gain, f"batch.size={rows}: {gain:.0%} less time for the same tokens; learns in fewer, larger steps"
