"""How long a step takes: the sum of its terms on a machine (L0, L1), or a line through two probes of it (L2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penjing.plan.device_model import Machine
from penjing.plan.step_workload import VALUE_BYTES, Workload

EXPOSED_SHARE = 0.15  # of sharded weights' exchange that no computation hides
HIDDEN_SHARE = 0.5  # of a step's computation that can hide an exchange of gradients


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, by what they are spent on. `launch` is what the host keeps the device waiting; of
    a CPU, what calling operations takes."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    head: float = 0.0
    launch: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    data_wait: float = 0.0

    @property
    def seconds(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def bottleneck(self) -> str:
        """The largest term."""
        terms = asdict(self)
        return max(terms, key=lambda name: terms[name])


def step_time(work: Workload, machine: Machine, *, loader_tokens_per_second: float = 0.0) -> StepTime:
    """The step by its terms, each at the machine's rate. loader_tokens_per_second: of the data alone; 0 = no wait."""
    dtype, moved = work.dtype, machine.bytes_per_second
    matmuls = sum(
        count * machine.matmul_seconds(rows, inner, outputs, dtype) for rows, inner, outputs, count in work.matmuls()
    )
    rate = machine.rate(dtype)
    if work.attention == "fused":
        keys = sum(work.layer_keys()) / work.shape.layers
        attention = work.attention_flops() / machine.attention_rate(dtype, keys)
    else:  # matmuls of small heads run at about six tenths of large ones
        attention = work.attention_flops() / (0.6 * rate) + work.map_bytes() / moved
    elementwise, head = work.elementwise_bytes() / moved, work.head_bytes() / moved
    busy = matmuls + attention + elementwise + head
    host = work.kernels() * machine.launch_seconds
    optimizer = work.optimizer_bytes() / moved + work.optimizer_flops() / rate
    passes, exchange = work.passes, work.exchanged_bytes() / machine.bus_bytes_per_second
    if work.ranks > 8:
        exchange *= 2.5  # between nodes
    if work.sharding == "fsdp":
        exposed = exchange * EXPOSED_SHARE
    else:  # the gradients of the last pass go out while it runs; the last bucket has nothing left to hide behind
        exposed = max(0.1 * exchange, exchange - HIDDEN_SHARE * busy)
    # A CPU calls its operations itself; a device's host calls them while it works.
    waits = host if machine.kind == "cpu" else max(0.0, host - busy)
    seconds = passes * (busy + waits)
    fed = passes * work.tokens / loader_tokens_per_second if loader_tokens_per_second else 0.0
    return StepTime(
        matmuls=passes * matmuls,
        attention=passes * attention,
        elementwise=passes * elementwise,
        head=passes * head,
        launch=passes * waits,
        optimizer=optimizer,
        communication=exposed if work.ranks > 1 else 0.0,
        data_wait=max(0.0, fed - seconds - optimizer),
    )


@dataclass(frozen=True, slots=True)
class LinearFit:
    """seconds = fixed + each x size."""

    fixed: float
    each: float

    def at(self, size: float) -> float:
        return self.fixed + self.each * size


def two_points(first: tuple[float, float], second: tuple[float, float]) -> LinearFit:
    """The line through two probes (size, seconds), the larger one trusted where they contradict each other.

    Size is whatever was varied: rows of a pass, or passes of a step. A line that would cross zero, or fall, becomes
    one through the origin or a level one.
    """
    (small, quick), (large, slow) = sorted((first, second))
    if large == small:
        return LinearFit(0.0, slow / large)
    each = (slow - quick) / (large - small)
    if each <= 0:
        return LinearFit(slow, 0.0)
    fixed = slow - each * large
    return LinearFit(fixed, each) if fixed >= 0 else LinearFit(0.0, slow / large)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Writing answers: how many, how long, how many at once. Tokens."""

    answers: int
    prompt_tokens: float
    answer_tokens: float  # of an answer on average
    longest: int  # answer allowed
    slots: int  # written at once


def decode_time(decode: Decode, work: Workload, machine: Machine) -> float:
    """Seconds of a round of answers: prompts read at the matmuls' rate, then one step for each token of the slots.

    A step takes the longest of reading weights (of a mixture those of all experts that a slot chooses) and keys, its
    matmuls, and its launches (a third of a training pass's); on a CPU the launches come on top.
    """
    shape = work.shape
    together = min(decode.slots, decode.answers)
    weights = shape.matrices_read(together) * VALUE_BYTES[work.dtype]
    rate = machine.rate(work.dtype)
    prefill = 2.0 * shape.matrices * decode.answers * decode.prompt_tokens / rate
    keys = decode.prompt_tokens + decode.answer_tokens / 2
    cache = 2 * together * shape.layers * shape.key_size * keys * VALUE_BYTES[work.dtype]
    host = work.kernels() / 3 * machine.launch_seconds
    busy = max(
        (weights + cache) / machine.bytes_per_second,
        together * (2.0 * shape.matrices + 4.0 * shape.layers * shape.query_size * keys) / rate,
    )
    step = busy + host if machine.kind == "cpu" else max(busy, host)
    steps = max(float(decode.longest), decode.answers * decode.answer_tokens / together)
    return prefill + steps * step


def interval(seconds: float, margin: float) -> tuple[float, float]:
    """The range that should hold four of five outcomes."""
    return seconds * (1 - margin), seconds * (1 + margin)


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the one below which `share` of them lie, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
