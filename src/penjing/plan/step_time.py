"""Time of a step: the sum of its terms on a machine (L0, L1), or a line through two probes (L2)."""

from dataclasses import asdict, dataclass

from penjing.plan.device_model import Machine
from penjing.plan.step_workload import VALUE_BYTES, Workload

EXPOSED_SHARE = 0.15  # fraction of FSDP communication that no computation hides
HIDDEN_SHARE = 0.5  # fraction of a step's computation that can hide a gradient all-reduce


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step, by term. `launch`: time the device waits for the host; on a CPU, the call overhead
    of operations."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    head: float = 0.0
    launch: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0

    @property
    def seconds(self) -> float:
        return float(sum(asdict(self).values()))

    @property
    def bottleneck(self) -> str:
        """The largest term."""
        terms = asdict(self)
        return max(terms, key=lambda name: terms[name])


def step_time(work: Workload, machine: Machine) -> StepTime:
    """Each term of the step at the machine's rate. The data are there when they are needed."""
    dtype, bandwidth = work.dtype, machine.bytes_per_second
    matmuls = sum(
        count * machine.matmul_seconds(rows, inner, outputs, dtype) for rows, inner, outputs, count in work.matmuls()
    )
    keys = sum(work.layer_keys()) / work.shape.layers
    attention = work.attention_flops() / machine.attention_rate(dtype, keys)
    elementwise, head = work.elementwise_bytes() / bandwidth, work.head_bytes() / bandwidth
    busy = matmuls + attention + elementwise + head
    host = work.kernels() * machine.launch_seconds
    sharing = optimizer_ranks(work, machine)
    optimizer = work.optimizer_bytes() / bandwidth + work.optimizer_flops() / (machine.rate(dtype) * sharing)
    passes = work.passes
    exposed = exposed_seconds(work, machine, busy) + work.shared_weight_bytes(sharing) / machine.bus_bytes_per_second
    # On a CPU the call overhead adds up; a GPU computes while its host launches.
    exposed_launch = host if machine.on_host else max(0.0, host - busy)
    return StepTime(
        matmuls=passes * matmuls,
        attention=passes * attention,
        elementwise=passes * elementwise,
        head=passes * head,
        launch=passes * exposed_launch,
        optimizer=optimizer,
        communication=exposed if work.ranks > 1 else 0.0,
    )


def exposed_seconds(work: Workload, machine: Machine, busy: float) -> float:
    """Communication of a step that no computation hides. busy: seconds of one pass."""
    layout, bus = work.layout, machine.bus_bytes_per_second
    within, between = work.communication_bytes()
    between_nodes = layout.network(bus)
    sharded = within / (bus if layout.nodes == 1 or layout.within_node else between_nodes)
    # The ranks of a machine share its network; a ring over whole copies crosses it once.
    replicas = between * (layout.group if layout.within_node else 1) / (bus if layout.nodes == 1 else between_nodes)
    if "weights" in layout.shards:  # each pass gathers, during all of its computation
        return max(EXPOSED_SHARE * sharded, sharded - work.passes * busy) + max(0.1 * replicas, replicas - busy)
    # Gradients are reduced during the last backward pass; nothing hides the last bucket.
    exchange = sharded + replicas
    return max(0.1 * exchange, exchange - HIDDEN_SHARE * busy)


def optimizer_ranks(work: Workload, machine: Machine) -> int:
    """How many ranks share Muon's orthogonalizations: on CPUs all of DDP's (optim/ranks.py)."""
    return work.ranks if machine.on_host and not work.layout.shards else 1


@dataclass(frozen=True, slots=True)
class LinearFit:
    """seconds = fixed + slope x size."""

    fixed: float
    slope: float

    def at(self, size: float) -> float:
        return self.fixed + self.slope * size


def fit_two_points(first: tuple[float, float], second: tuple[float, float]) -> LinearFit:
    """The line through two probes (size, seconds). Size: rows of a pass, or passes of a step.

    The larger probe counts where they contradict each other: a negative intercept becomes a line through the origin, a
    negative slope a constant.
    """
    (small, quick), (large, slow) = sorted((first, second))
    if large == small:
        return LinearFit(0.0, slow / large)
    slope = (slow - quick) / (large - small)
    if slope <= 0:
        return LinearFit(slow, 0.0)
    fixed = slow - slope * large
    return LinearFit(fixed, slope) if fixed >= 0 else LinearFit(0.0, slow / large)


@dataclass(frozen=True, kw_only=True)
class DecodeWorkload:
    """A batch of sampled answers."""

    answers: int
    prompts: int  # each is read once: its answers share its keys
    prompt_tokens: float
    answer_tokens: float  # mean tokens of an answer
    longest: int  # max_new_tokens
    slots: int  # sequences decoded concurrently


def decode_time(decode: DecodeWorkload, work: Workload, machine: Machine) -> float:
    """Seconds to sample all answers: prefill at the matmul rate, then one decode step per token.

    A step takes the maximum of reading weights (in a MoE model those of all chosen experts) and KV cache, its matmuls,
    and its launches (a third of a training pass's). On a CPU the launches are added.
    """
    shape = work.shape
    concurrent = min(decode.slots, decode.answers)
    weights = shape.matrices_read(concurrent) * VALUE_BYTES[work.dtype]
    rate = machine.rate(work.dtype)
    prefill = 2.0 * shape.matrices * decode.prompts * decode.prompt_tokens / rate
    keys = decode.prompt_tokens + decode.answer_tokens / 2
    cache = 2 * concurrent * shape.layers * shape.key_size * keys * VALUE_BYTES[work.dtype]
    host = work.kernels() / 3 * machine.launch_seconds
    busy = max(
        (weights + cache) / machine.bytes_per_second,
        concurrent * (2.0 * shape.matrices + 4.0 * shape.layers * shape.query_size * keys) / rate,
    )
    step = busy + host if machine.on_host else max(busy, host)
    steps = max(float(decode.longest), decode.answers * decode.answer_tokens / concurrent)
    return prefill + steps * step


def interval(seconds: float, margin: float) -> tuple[float, float]:
    """The 80 % interval."""
    return seconds * (1 - margin), seconds * (1 + margin)
