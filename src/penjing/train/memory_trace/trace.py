"""Predicts the memory of a run's step by running the real step on the meta device.

The model, the objective, the optimizers and the step (`loop.py`) are the run's. The batches have the largest shape
(`Stage.example_batch`), and the device is fake (`penjing/plan/memory/fake_device_mode.py`).
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache

import torch

from penjing.base.errors import UserError
from penjing.plan.flops import parameters
from penjing.plan.layout import ONE_RANK, Layout
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import FakeDeviceMode
from penjing.plan.memory.host_rss import extrapolate_peak, extrapolate_plan, process_plan
from penjing.plan.memory.report import MemoryPlan, plan_from
from penjing.plan.memory.sharded_memory import rank_memory
from penjing.plan.memory.trace import Trace, Tracer
from penjing.train.batch_geometry import batch_geometry
from penjing.train.build_model import BuiltRun, build_model, complete
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.memory_trace.dummy_batches import DummySource, TraceStrategy, on_target, tensors_of
from penjing.train.precision import Precision
from penjing.train.resolve import with_settings
from penjing.train.stages.base import make_stage
from penjing.train.throughput import Meter

META = torch.device("meta")
# Allocations in these files count as the head's and the loss's.
LOSS_FILES = ("penjing/kernels/fused_", "penjing/objective/")
STEPS = 2  # the first step allocates the optimizer state, the second has it from the start
CPU_ROWS = (4, 8)
# Of a step that is traced: a layer takes 0.25 s over all sizes that are tried, 2^36 logits are 512 blocks
# of the head and over 100 GiB, and optimizers work in chunks of parameters. Published models have 126 layers at most.
MAX_LAYERS, MAX_LOGITS, MAX_PARAMETERS = 160, 1 << 36, 10**11
MAX_VALUES = 1 << 36  # of a pass on a CPU; a model of 1B parameters has an eighth of them in rows of 4,096 tokens
NOT_TRACED_ON_CPU = "memory-mapped data files are not counted; heap fragmentation is an estimate"


# Imports what a training run imports, runs a forward and backward matmul and an optimizer step: libraries allocate
# caches and load further parts at first use.
_PROCESS = """
import torch
from penjing.base.process_info import peak_resident_bytes
from penjing.optim.adamw_no_dynamo import FusedAdamW
from penjing.train import build
x = torch.nn.Parameter(torch.ones(128, 128))
for dtype in (torch.float32, torch.bfloat16):
    (x.to(dtype) @ x.to(dtype).T).float().sum().backward()
optimizer = FusedAdamW([{"params": [x]}], 1e-3, (0.9, 0.95), 1e-8)
optimizer.step()
optimizer.zero_grad()
del x, optimizer
print(peak_resident_bytes())
"""


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """The quantities besides the settings that a trace of a run's step depends on."""

    micro_size: int  # rows (pairs, prompts) of one forward pass on one device
    accumulate: int = 1  # traced forward passes of a step; more than two change nothing
    layout: Layout = ONE_RANK


@cache
def measured_process_bytes() -> int:
    """Memory of a training process without a model: measured once in a subprocess, which takes some seconds."""
    completed = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True)
    if completed.returncode:
        raise UserError("a process could not be measured", got=completed.stderr.strip().splitlines()[-1:])
    return int(completed.stdout.split()[-1])


def predict_memory(
    run: Run,
    target: Target,
    *,
    micro_size: int | None = None,
    layout: Layout = ONE_RANK,
    process_bytes: int | None = None,
) -> MemoryPlan:
    """The memory of the run's step on `target`, per rank. Needs no device, no data and no weights.

    micro_size: rows of one forward pass; None = from the run's settings.
    process_bytes: on a CPU, memory of the process without tensors; None = measured in a separate process.
    Raises UserError for a run that cannot be traced in a minute or two, or if the rows do not divide evenly.
    """
    rows = micro_size or batch_geometry(run, layout.ranks, torch.device(target.kind)).micro_size
    check_size(run, rows, on_host=target.device.is_host)
    shape = TraceShape(
        micro_size=rows, accumulate=min(2, max(1, run.batch.size // (rows * layout.ranks))), layout=layout
    )
    if target.device.is_host:
        return _on_cpu(run, target, shape, measured_process_bytes() if process_bytes is None else process_bytes)
    trace, notes = trace_run(run, target, shape)
    trace, communication_bytes, more = rank_memory(trace, layout, _offloaded(run, layout))
    return plan_from(trace, target, communication_bytes=communication_bytes, notes=(*notes, *more))


def check_size(run: Run, rows: int, *, on_host: bool) -> None:
    """Raises UserError for a run that cannot be traced in a minute or two. rows: of a pass."""
    model, tokens = run.model, (min(rows, CPU_ROWS[1]) if on_host else rows) * run.data.seq_len
    widths = model.hidden_size + model.intermediate_size + model.num_attention_heads * model.head_dim
    values = tokens * model.num_hidden_layers * widths if on_host else 0  # a CPU works in chunks of them
    for where, count, most in (
        ("model.num_hidden_layers", model.num_hidden_layers, MAX_LAYERS),
        ("batch.micro_size x data.seq_len x model.vocab_size", tokens * model.vocab_size, MAX_LOGITS),
        ("parameters", parameters(model).total, MAX_PARAMETERS),
        ("tokens x model.num_hidden_layers x widths", values, MAX_VALUES),
    ):
        if count > most:
            hint = "`penjing plan --rough` estimates the memory by formula."
            raise UserError("too large to trace", where=where, got=count, wanted=f"at most {most}", next_step=hint)


def _offloaded(run: Run, layout: Layout) -> frozenset[str]:
    """What `parallel.offload` keeps in the host's memory."""
    if not run.parallel.offload:
        return frozenset()
    return layout.shards - {"weights"} if layout.strategy.startswith("zero") else layout.shards


def _on_cpu(run: Run, target: Target, shape: TraceShape, process_bytes: int) -> MemoryPlan:
    """On a CPU the model works in chunks, so that tracing time grows with the rows: few rows are traced."""

    def traced(rows: int) -> tuple[Trace, tuple[str, ...]]:
        whole, notes = trace_run(run, target, replace(shape, micro_size=rows))
        return rank_memory(whole, shape.layout)[0], notes

    def plan(trace: Trace, notes: tuple[str, ...], event: int | None = None) -> MemoryPlan:
        return process_plan(
            trace,
            target,
            process_bytes=process_bytes,
            saved_bytes=_copied_bytes(run, trace),
            event=event,
            notes=(*notes, NOT_TRACED_ON_CPU),
        )

    low, high = CPU_ROWS
    if shape.micro_size <= high:
        return plan(*traced(shape.micro_size))
    at_low, at_high = traced(low), traced(high)
    first, second = extrapolate_peak(at_low[0], at_high[0], CPU_ROWS, shape.micro_size)
    return extrapolate_plan(plan(*at_low, first), plan(*at_high, second), CPU_ROWS, shape.micro_size)


def _copied_bytes(run: Run, trace: Trace) -> int:
    """The size of the copy for a background checkpoint: trained weights and optimizer state."""
    if not run.checkpoint.async_:
        return 0
    # A weight's operation is its component's name; other storages of these components are copies in another dtype.
    return sum(
        storage.num_bytes
        for storage in trace.storages
        if storage.component == "optimizer state"
        or (storage.component in ("weights", "master weights") and storage.operation == storage.component)
    )


def trace_run(run: Run, target: Target, shape: TraceShape) -> tuple[Trace, tuple[str, ...]]:
    """The trace of STEPS steps with a validation between them, and the assumptions."""
    notes = ["every position is assumed to be a target, the largest possible number"]
    device = torch.device(target.kind)
    precision = Precision.resolve(run.compute, device, capability=target.capability)
    precision.require(device, target.capability)
    run = with_settings(run, {"compute.dtype": precision.matmul})
    on_host = target.device.is_host
    tracer = Tracer(vocabulary=run.model.vocab_size, loss_files=LOSS_FILES, kernel_temporaries=not on_host)
    strategy = TraceStrategy(tracer, device, shape.layout)
    stage = make_stage(run, strategy)
    with FakeDeviceMode(target), META:
        model = build_model(stage, precision, META)
    with tracer, on_target(target):
        tracer.tag_model(model.trainable, precision.dtype)
        notes += stage.assume_data()
        built = complete(model, stage, strategy, precision)
        for frozen in stage.frozen_models():
            tracer.tag_model(frozen)
        context = context_of(built, shape, tracer)
        # On a CPU there is no caching allocator: the optimizer state is made separately, and one step is enough.
        if on_host:
            _make_state(built, tracer)
        for index in range(1 if on_host else STEPS):
            tracer.phase = "forward"
            step(context, index)
            tracer.tag_state(built.optimizers)
            if index == 0:
                _validate(built, shape, tracer)
    if not on_host and run.compute.compile != "off":
        notes.append("traced without torch.compile, which usually takes less memory")
    if run.model.is_mixture:
        notes.append("tokens are assumed to spread evenly over experts")
    return tracer.trace, tuple(notes)


def context_of(built: BuiltRun, shape: TraceShape, tracer: Tracer) -> TrainingContext:
    run, stage = built.run, built.stage
    return TrainingContext(
        strategy=built.strategy,
        model=built.wrapped,
        objective=built.objective,
        source=DummySource(lambda: stage.example_batch(shape.micro_size, META), tracer, run.data.prefetch),
        optimizers=built.optimizers,
        schedule=run.schedule,
        meter=Meter(0.0, None),
        num_steps=STEPS,
        accumulate=shape.accumulate,
        max_grad_norm=run.max_grad_norm,
    )


def _make_state(built: BuiltRun, tracer: Tracer) -> None:
    """Let the optimizers allocate their state, with dummy gradients."""
    with tracer.during("optimizer"):
        for parameter in built.trainable.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        tracer.tag_gradients(built.trainable)
        for optimizer in built.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tracer.tag_state(built.optimizers)


def _validate(built: BuiltRun, shape: TraceShape, tracer: Tracer) -> None:
    """A forward pass on held-out rows, as in the stage's validation."""
    size = min(built.stage.validation_size(shape.micro_size), built.run.eval.sequences)
    if not size:
        return
    with tracer.during("evaluate"), torch.no_grad():
        batch = built.stage.example_batch(size, META)
        tracer.tag(tensors_of(batch), "batch")
        built.objective(built.wrapped, batch)
