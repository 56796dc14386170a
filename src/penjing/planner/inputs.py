"""Inputs of a plan, from settings and options: device, sequence lengths, number of tokens, workload of one step."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

import torch

from penjing import devices
from penjing.base import formatting as units
from penjing.base.errors import UserError
from penjing.base.process_info import thread_seconds
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.dataset_stats import STATS
from penjing.devices import host
from penjing.devices.choose import local_device
from penjing.kernels.triton import ops as gpu
from penjing.objective.base import UnitLengths
from penjing.objective.rollout import Rollout
from penjing.plan import compute_optimal as tokens
from penjing.plan import cost
from penjing.plan.device_model import Machine, machine_from_spec
from penjing.plan.gpu_specs import DEVICE_TYPE, GpuSpec, find_gpu_spec, match_gpu_spec
from penjing.plan.layout import NODE_RANKS, Layout
from penjing.plan.memory import Target
from penjing.plan.microbenchmarks import attention_rate, copy_rate, launch_seconds, matmul, profile_key
from penjing.plan.profile import find_profile, gpu_machine, with_specs
from penjing.plan.shape import Shape, shape_of
from penjing.plan.step_time import DecodeWorkload, decode_time, step_time
from penjing.plan.step_workload import Workload
from penjing.plan.time_interval import slowdown
from penjing.plan.trainable import Trainable, trainable_from_settings
from penjing.train.batch_geometry import batch_geometry
from penjing.train.compile_policy import choose, obstacle
from penjing.train.config import Run
from penjing.train.load_model import set_threads
from penjing.train.memory_trace.fit import layout_of
from penjing.train.precision import Precision
from penjing.train.resolve import with_settings
from penjing.train.step_timing import SAVE_SECONDS, WRITE_RATE

START_SECONDS = 20.0  # imports, reading data and the probe, before step 1: an estimate
COPY_RATE = 4e9  # bytes per second of copying a checkpoint from a GPU into pageable memory: an estimate
BUSY_FACTOR = 1.2  # slowdown of a measurement by other programs from which on a note says so
DEFAULT_STEPS = 1000  # of a stage without data
RECORDS = ("preferences", "prompts")  # formats whose records are the units of a batch; of the others they are packed
READ_BYTES = 32e6  # of the text of data.train; what follows is taken to be alike
CAPABILITY = {
    "pascal": (6, 0),
    "volta": (7, 0),
    "turing": (7, 5),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `penjing plan`, in addition to the settings."""

    gpu: str = ""
    gpus: int = 1
    nodes: int = 0  # machines that the GPUs are in; 0 = as many as hold eight each
    network: float = 0.0  # Gbit/s of a machine; 0 = assumed
    budget: str = ""
    tokens: str = ""
    unique: str = ""
    price: str = ""

    def layout(self, run: Run) -> Layout:
        """How the GPUs share a step. Raises UserError if they do not divide among the machines."""
        nodes = self.nodes or math.ceil(self.gpus / NODE_RANKS)
        if self.gpus % nodes:
            raise UserError("does not divide", where="--gpus", got=self.gpus, wanted=f"a multiple of {nodes} machines")
        return layout_of(run.parallel, self.gpus, nodes, self.network * 1e9 / 8)


def accepted(run: Run, machine: Machine, gpus: int) -> bool:
    """Whether training accepts these settings on such devices, by its own checks."""
    try:
        dtype, device = dtype_of(run, machine), torch.device(machine.kind)
        batch_geometry(run, gpus, device)
        choose(run.compute.compile, machine.device, _obstacle(run, machine, dtype), 0.0)
        card = match_gpu_spec(machine.name)
        capability = target_of(card).capability if card else (0, 0)
        Precision.resolve(with_settings(run, {"compute.dtype": dtype}).compute, device).require(device, capability)
    except UserError:
        return False
    return True


def target_of(card: GpuSpec, machine: Machine | None = None) -> Target:
    """The target device for a trace."""
    capability = CAPABILITY.get(card.generation, (8, 0))
    if card.generation == "consumer":
        series = {"20": (7, 5), "30": (8, 6), "40": (8, 9), "50": (12, 0)}
        capability = series.get(card.name.split()[1][:2], (8, 6))
    elif card.name in ("A10", "A40"):
        capability = (8, 6)
    context = (machine or machine_from_spec(card)).context_bytes
    return Target(name=card.name, capability=capability, memory_bytes=card.memory_bytes, context_bytes=context)


def find_machine(options: PlanOptions, run: Run) -> tuple[Machine, Target, list[str]]:
    """The named GPU or this machine, with its profile if there is one; and notes."""
    if options.gpu:
        machine = gpu_machine(options.gpu)
        return machine, target_of(find_gpu_spec(options.gpu), machine), []
    device = local_device(run.compute.device)
    return _this_cpu(run) if devices.of(device).is_host else _this_accelerator(device, run)


def _this_accelerator(device: torch.device, run: Run) -> tuple[Machine, Target, list[str]]:
    kind = devices.of(device)
    name, total = kind.name(device), kind.memory_bytes(device)
    spec = match_gpu_spec(name, total)
    machine, notes = _speed(device, run, spec)
    missing = gpu.missing()
    machine = replace(machine, memory_bytes=total, triton_kernels=not missing)
    notes += [f"planned without Triton kernels: {missing}"] if missing else []
    target = target_of(spec, machine) if spec else Target(kind=kind.type, name=name)
    return machine, replace(target, memory_bytes=total, triton_kernels=not missing), notes


def _this_cpu(run: Run) -> tuple[Machine, Target, list[str]]:
    set_threads(run.compute.threads, 1)
    device, memory = devices.HOST, host.available_bytes()
    target = Target(kind=device.type, name=host.cpu_name(), memory_bytes=memory)
    machine, notes = _speed(device, run)
    held = host.memory_bytes() - memory
    notes += [f"other programs hold {units.gibibytes(held)} of this machine's memory"] if held > memory // 4 else []
    return machine, target, notes


def _speed(device: torch.device, run: Run, spec: GpuSpec | None = None) -> tuple[Machine, list[str]]:
    """A device of this machine by its profile, else its data sheet, else a short measurement; and notes."""
    profile, changes = find_profile(profile_key(device)) or (None, [])
    if profile:
        stale = f"the profile is stale ({', '.join(changes)}): run `penjing plan profile`"
        return with_specs(profile.machine(), spec), [stale] if changes else []
    if spec:
        return machine_from_spec(spec), []
    machine, busy = _measured_once(device, run.compute.dtype, torch.get_num_threads())
    return machine, ["no profile of this machine: `penjing plan profile` halves the interval", *busy_notes(busy)]


@lru_cache(maxsize=8)
def _measured_once(device: torch.device, setting: str, threads: int) -> tuple[Machine, float]:
    """The machine, and the factor by which other programs slowed the measurement."""
    kind, before = devices.of(device), thread_seconds()
    dtype = kind.dtype_name(setting, device)
    rate = matmul(512, 512, 512, dtype, device, tries=3)["flops_per_second"]
    machine = Machine(
        name=kind.name(device),
        kind=device.type,
        level="L0",
        source="a short measurement",
        matmul_flops={dtype: rate},
        attention_share=min(1.0, attention_rate(dtype, device) / rate),
        bytes_per_second=copy_rate(device),
        launch_seconds=launch_seconds(device),
        memory_bytes=kind.memory_bytes(device),
        peak_flops={dtype: rate},
    )
    return machine, slowdown([thread_seconds(since=before)])


def busy_notes(factor: float) -> list[str]:
    """A line if other programs slowed a measurement by this factor."""
    if factor < BUSY_FACTOR:
        return []
    return [f"other programs used the cores while this machine was measured: times may be {factor:.1f} x too long"]


def lengths_of(run: Run) -> UnitLengths:
    """Assumed lengths of one unit of the run's batches; where units are records of the data, their mean."""
    tokens, records = _data_size(run.data) if run.data.train and run.data.format in RECORDS else (0, 0)
    every_unit = not run.max_steps or 0 < records <= run.max_steps * run.batch.size
    mean = min(run.data.seq_len, tokens / max(1, records))
    return run.objective.unit_lengths(run.data.seq_len, tokens=mean, every_unit=every_unit)


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Number of training tokens, and the reason for it."""

    steps: int
    tokens: int
    unique: int  # 0 = unknown
    reason: str

    @property
    def epochs(self) -> float:
        return self.tokens / self.unique if self.unique else 1.0


def unique_tokens(run: Run, options: PlanOptions) -> tuple[int, str]:
    """Tokens of the data, and where the number is from; 0: unknown, and why."""
    if options.unique:
        return cost.read_count(options.unique, "--unique"), "--unique"
    if not run.data.train:
        return 0, "no data given"
    num_tokens, records = _data_size(run.data)
    learned = records * lengths_of(run).tokens if run.data.format in RECORDS else num_tokens
    return round(learned), "data.train (estimate)"


def amount_of(run: Run, options: PlanOptions, shape: Shape, unique: int, source: str) -> TokenBudget:
    """Steps and tokens: from the command line, else from the settings, else compute-optimal. unique, source: see
    `unique_tokens`."""
    tokens_per_step = lengths_of(run).tokens * run.batch.size
    if options.tokens and options.tokens != "auto":
        total, reason = cost.read_count(options.tokens, "--tokens"), "--tokens"
    elif run.max_steps:
        total, reason = round(run.max_steps * tokens_per_step), f"max_steps={run.max_steps}"
    elif unique:
        total, reason = round(run.epochs * unique), f"{run.epochs:g} epoch{'s' * (run.epochs != 1)} of {source}"
    elif run.data.format == "documents":
        advice = tokens.advise(shape.parameters, shape.matrices)
        total, reason = round(advice.tokens), f"{source}: compute-optimal for this size"
    else:
        total, reason = round(DEFAULT_STEPS * tokens_per_step), f"{source}: {DEFAULT_STEPS} steps assumed"
    return TokenBudget(steps=max(1, math.ceil(total / tokens_per_step)), tokens=total, unique=unique, reason=reason)


@lru_cache(maxsize=8)
def _data_size(settings: DataSettings) -> tuple[int, int]:
    """Tokens of the records to learn from, and their number, estimated from their beginning. Raises UserError for a
    missing file, and for more broken records than data.max_bad_fraction."""
    part, num_bytes, stats = 1.0, 0, STATS[settings.format]()

    def show(fraction: float, so_far: int) -> None:
        nonlocal part, num_bytes
        part, num_bytes = fraction or part, so_far

    corpus = Corpus(settings, show)
    stats.count(takewhile(lambda _: num_bytes < READ_BYTES, corpus.records(corpus.counts())))
    part = part if num_bytes >= READ_BYTES else 1.0
    return round(stats.estimated_tokens / part), round(stats.num_records / part)


def workload_of(run: Run, machine: Machine, options: PlanOptions, micro_size: int, *, steps: int = 0) -> Workload:
    """The run's step on one device. steps: of the full run, which determine whether compiling pays.

    Raises UserError if training cannot compile as the settings request.
    """
    dtype, lengths = dtype_of(run, machine), lengths_of(run)
    eager = Workload(
        shape=shape_of(run.model),
        tokens=max(1, round(micro_size * lengths.tokens)),
        seq_len=run.data.seq_len,
        keys=lengths.keys,
        passes=max(1, run.batch.size // (micro_size * options.gpus)),
        dtype=dtype,
        optimizer=run.optimizer.name,
        fused_optimizer=True,
        triton_kernels=machine.runs_triton_kernels(dtype),
        recompute=run.compute.activation_checkpointing,
        dropout=run.regularization.dropout > 0,
        layout=options.layout(run),
        trainable=trainable_part(run),
        extra_forwards=lengths.extra_forwards,
    )
    seconds = steps * step_time(eager, machine).seconds
    missing = _obstacle(run, machine, dtype)
    if "weights" in eager.layout.shards:  # as train/compile_policy.py decides
        missing = "the weights are sharded"
    how = choose(run.compute.compile, machine.device, missing, seconds).how
    return replace(eager, compiled=how != "off")


def trainable_part(run: Run) -> Trainable | None:
    """The trainable part of the run's model; None: all of it."""
    return trainable_from_settings(run.model, run.lora, run.freeze)


def _obstacle(run: Run, machine: Machine, dtype: str) -> str:
    """Why training would not compile. A missing compiler counts if the plan is for this machine; a CPU always is."""
    missing = obstacle(run, machine.device, bfloat16=dtype == "bfloat16")
    local = machine.on_host or not machine.triton_kernels
    return missing or (machine.device.missing_compiler() if local else "")


def dtype_of(run: Run, machine: Machine) -> str:
    """What `compute.dtype` means on a machine."""
    if run.compute.dtype != "auto":
        return run.compute.dtype
    if machine.kind != DEVICE_TYPE:
        return machine.device.dtype_name("auto", torch.device(machine.kind))
    card = match_gpu_spec(machine.name)
    return "bfloat16" if card is None or card.has_bfloat16 else "float16"


def busy_seconds(run: Run, work: Workload, machine: Machine) -> float:
    """Time of one step, with what it generates."""
    return step_time(work, machine).seconds + generation_seconds(run, work, machine)


def generation_seconds(run: Run, work: Workload, machine: Machine) -> float:
    """Generation time of one step; 0 if the stage generates nothing."""
    rollout = run.objective.sampling
    if rollout is None:
        return 0.0
    prompts = max(1, run.batch.size * rollout.steps_per_rollout // work.ranks)
    return _decoding(run, rollout, prompts, rollout.num_generations, work, machine) / rollout.steps_per_round


def _decoding(run: Run, rollout: Rollout, prompts: int, answers: int, work: Workload, machine: Machine) -> float:
    """Seconds to sample so many answers to each prompt."""
    mean = rollout.max_new_tokens / 2
    decode = DecodeWorkload(
        answers=prompts * answers,
        prompts=prompts,
        prompt_tokens=max(1.0, lengths_of(run).tokens - rollout.num_generations * mean),
        answer_tokens=mean,
        longest=rollout.max_new_tokens,
        slots=rollout.max_concurrent or machine.device.decode_slots,
    )
    return decode_time(decode, work, machine)


def _validation_seconds(run: Run, work: Workload, machine: Machine) -> float:
    """Seconds of one validation: a forward pass over held-out rows; in RL a greedy and a sampled answer per prompt."""
    rollout, share = run.objective.sampling, max(1, math.ceil(run.eval.sequences / work.ranks))
    if rollout and run.data.format == "prompts":
        return _decoding(run, rollout, share, 2, work, machine)
    return run.eval.sequences * lengths_of(run).tokens * _forward_seconds(work, machine)


def _forward_seconds(work: Workload, machine: Machine) -> float:
    """Seconds of a token's forward pass, on all devices together."""
    step = step_time(work, machine)
    forward = (step.matmuls + step.attention + step.elementwise + step.head) / 3
    return forward / max(1, work.tokens * work.passes) / work.ranks


def checkpoint_bytes(run: Run, shape: Shape) -> int:
    """Size of a checkpoint: float32 weights (with adapters only these), and optimizer state."""
    part = trainable_part(run)
    trained = shape.parameters if part is None else part.num_trainable
    more = 4 * shape.width * shape.vocabulary if run.optimizer.name == "muon" and part is None else 0  # AdamW's
    return more + 4 * (trained if run.lora.rank else shape.parameters) + run.state_bytes * trained


def checkpoint_seconds(run: Run, saved: int, machine: Machine, step_seconds: float, steps: int) -> float:
    """Seconds that training waits for all checkpoints of a run.

    An asynchronous checkpoint blocks for its copy, and for the rest of the previous write if that is not finished. The
    last one is synchronous.
    """
    checkpoints = math.ceil(steps / run.checkpoint.every)
    write = saved / WRITE_RATE
    copy = saved / (machine.bytes_per_second if machine.on_host else COPY_RATE)
    blocked = write
    if run.checkpoint.async_:
        blocked = max(0.0, write - run.checkpoint.every * step_seconds)
    return checkpoints * (SAVE_SECONDS + copy) + (checkpoints - 1) * blocked + write


def parts_of(run: Run, work: Workload, machine: Machine, steps: int, unique: int) -> tuple[dict[str, float], float]:
    """Seconds of the run by part, and the generation time of one step. unique: tokens of the data."""
    generation = generation_seconds(run, work, machine)
    busy = step_time(work, machine).seconds + generation
    validations = run.eval.validations(steps) if run.data.holds_out else 0
    return {
        "training": steps * busy,
        "validation": validations * _validation_seconds(run, work, machine),
        "checkpoint": checkpoint_seconds(run, checkpoint_bytes(run, work.shape), machine, busy, steps),
        "start-up": START_SECONDS,
        "frozen model": lengths_of(run).forwards_before * unique * _forward_seconds(work, machine),
        "compile": machine.device.compile_seconds if work.compiled else 0.0,
    }, generation
