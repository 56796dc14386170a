"""What a run's step needs of memory, before anything is there: its real parts on the meta device, its real step.

The model, the objective and the optimizers are the run's own, and the step is that of `loop.py`; the data are batches
of the largest shape (`Stage.example_batch`), the device a fake one (`penjing/plan/memory/fake_device_mode.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penjing.model.config import ModelConfig
from penjing.model.transformer import Transformer
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import FakeDeviceMode
from penjing.plan.memory.host_rss import extrapolate_peak, extrapolate_plan, measured_process_bytes, process_plan
from penjing.plan.memory.report import MemoryPlan, plan_from
from penjing.plan.memory.sharded_memory import Layout, rank_memory
from penjing.plan.memory.trace import Trace, Tracer
from penjing.track.base import Trackers
from penjing.train.batch_geometry import batch_geometry
from penjing.train.build_model import BuiltRun, build_model, complete
from penjing.train.config import Run
from penjing.train.loop import TrainingContext, step
from penjing.train.memory_trace.dummy_batches import DummySource, TraceStrategy, on_target, tensors_of
from penjing.train.precision import Precision
from penjing.train.stages.base import make_stage
from penjing.train.throughput import Meter

META = torch.device("meta")
# Lines of these files are the head's and the loss's.
LOSS_FILES = ("penjing/kernels/fused_", "penjing/objective/")
STEPS = 2  # the first makes the optimizer's state, the second has it from its first line on
CPU_ROWS = (4, 8)
NOT_TRACED_ON_CPU = "data files that are mapped are not counted; the heap's waste is an estimate"


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """What of a run's step its trace depends on beside the settings."""

    micro_size: int  # rows (pairs, prompts) of one forward pass on one device
    accumulate: int = 1  # forward passes of a step that are traced; more than two change nothing
    ranks: int = 1
    layout: Layout = "single"


def predict_memory(
    run: Run,
    target: Target,
    *,
    micro_size: int | None = None,
    ranks: int = 1,
    engine: Layout = "single",
    process_bytes: int | None = None,
) -> MemoryPlan:
    """What the run's step takes of `target`, per rank. No device, no data and no weights are needed.

    micro_size: rows of one forward pass; None = as the run says. engine: how `ranks` share the work. process_bytes: of
    a CPU, what the process holds without tensors; None = measured in a process of its own.
    Raises UserError for what cannot be traced, or if the rows do not divide evenly.
    """
    rows = micro_size or batch_geometry(run, ranks, torch.device(target.kind)).micro_size
    shape = TraceShape(
        micro_size=rows,
        accumulate=min(2, max(1, run.batch.size // (rows * ranks))),
        ranks=ranks,
        layout="ddp" if ranks > 1 and engine == "single" else engine,
    )
    if target.kind == "cpu":
        return _on_cpu(run, target, shape, measured_process_bytes() if process_bytes is None else process_bytes)
    trace, notes = trace_run(run, target, shape)
    per_rank = rank_memory(trace, shape.layout, shape.ranks, largest_block_bytes(run.model))
    return plan_from(
        per_rank.trace, target, communication_bytes=per_rank.communication_bytes, notes=(*notes, *per_rank.notes)
    )


def _on_cpu(run: Run, target: Target, shape: TraceShape, process_bytes: int) -> MemoryPlan:
    """On a CPU the model works piece by piece, and tracing takes time in proportion to the rows: few are traced."""

    def traced(rows: int) -> tuple[Trace, tuple[str, ...]]:
        return trace_run(run, target, replace(shape, micro_size=rows))

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
    few, more = traced(low), traced(high)
    first, second = extrapolate_peak(few[0], more[0], CPU_ROWS, shape.micro_size)
    found = extrapolate_plan(plan(*few, first), plan(*more, second), CPU_ROWS, shape.micro_size)
    fits = found.total_bytes <= target.memory_bytes if target.memory_bytes else None
    return replace(found, fits=fits)


def _copied_bytes(run: Run, trace: Trace) -> int:
    """What a checkpoint written in the background is copied into first: trained weights and optimizer state."""
    if not run.checkpoint.async_:
        return 0
    # Weights are born when they are named; what else is called weights are copies in another dtype.
    return sum(
        storage.num_bytes
        for storage in trace.storages
        if storage.component == "optimizer state"
        or (storage.component in ("weights", "master weights") and storage.operation == storage.component)
    )


def largest_block_bytes(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the largest part that is gathered at once: (of a block, of the largest of blocks and tables)."""
    with torch.device(META):
        model = Transformer(config)
    block = max(sum(p.numel() for p in part.parameters()) for part in model.blocks)
    return block, max(block, model.embed.weight.numel())


# --- the parts -------------------------------------------------------------------------------------------------------


def trace_run(run: Run, target: Target, shape: TraceShape) -> tuple[Trace, tuple[str, ...]]:
    """The trace of STEPS steps and a validation between them, and what had to be assumed."""
    notes = ["every position is assumed to be a target, the most there can be"]
    device = torch.device(target.kind)
    precision = Precision.resolve(run.compute, device, capability=target.capability)
    precision.require(device, target.capability)
    run = replace(run, compute=precision.resolved(run.compute))
    tracer = Tracer(vocabulary=run.model.vocab_size, loss_files=LOSS_FILES, kernel_temporaries=target.kind == "cuda")
    strategy = TraceStrategy(tracer, device, shape.layout, shape.ranks)
    stage = make_stage(run, strategy)
    with FakeDeviceMode(target), META:
        model = build_model(stage, precision, META)
    with tracer, on_target(target):
        tracer.tag_model(model.trainable, precision.dtype)
        notes += stage.assume_data()
        built = complete(model, stage, strategy, precision)
        for frozen in stage.frozen_models():
            tracer.tag_model(frozen)
        context = _context(built, shape, tracer)
        # On a CPU, where freed memory has no history, the optimizer's state is made by itself and one step is enough.
        if target.kind == "cpu":
            _make_state(built, tracer)
        for index in range(1 if target.kind == "cpu" else STEPS):
            tracer.phase = "forward"
            step(context, index)
            tracer.tag_state(built.optimizers)
            if index == 0:
                _validate(built, shape, tracer)
    if target.kind == "cuda" and run.compute.compile != "off":
        notes.append("traced as it runs without torch.compile, which mostly takes less")
    if run.model.is_mixture:
        notes.append("tokens are taken to spread evenly over experts")
    return tracer.trace, tuple(notes)


# --- the step --------------------------------------------------------------------------------------------------------


def _context(built: BuiltRun, shape: TraceShape, tracer: Tracer) -> TrainingContext:
    run, stage = built.run, built.stage
    return TrainingContext(
        strategy=built.strategy,
        model=built.wrapped,
        objective=built.objective,
        source=DummySource(lambda: stage.example_batch(shape.micro_size, META), tracer, run.data.prefetch),
        optimizers=built.optimizers,
        schedule=run.schedule,
        trackers=Trackers([]),
        meter=Meter(0.0, None),
        num_steps=STEPS,
        accumulate=shape.accumulate,
        max_grad_norm=run.max_grad_norm,
    )


def _make_state(built: BuiltRun, tracer: Tracer) -> None:
    """Let the optimizers make their state, from gradients of no origin."""
    with tracer.during("optimizer"):
        for parameter in built.trainable.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        for optimizer in built.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tracer.tag_state(built.optimizers)


def _validate(built: BuiltRun, shape: TraceShape, tracer: Tracer) -> None:
    """A forward pass on held-out rows, as the stage does it."""
    size = min(built.stage.validation_size(shape.micro_size), built.run.eval.sequences)
    if not size:
        return
    with tracer.during("evaluate"), torch.no_grad():
        batch = built.stage.example_batch(size, META)
        tracer.tag(tensors_of(batch), "batch")
        built.objective(built.wrapped, batch)
