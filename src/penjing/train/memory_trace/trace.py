"""What a run's step needs of memory, before anything is there: its real parts on the meta device, its real step.

The model, the objective and the optimizers are the run's own, and the step is that of `loop.py`; the data are batches
of the largest shape (see `trace_batches.py`), the device a disguise (`penjing/plan/memory/disguise.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.kernels.fp8 import require_float8
from penjing.loader.shared_prompt_batch import AnswerBatch
from penjing.model import attention
from penjing.model.config import ModelConfig
from penjing.model.freeze import freeze
from penjing.model.linear import set_compute_dtype, use_float8
from penjing.model.lora import adapt, keep_base_in, strip, using
from penjing.model.transformer import Transformer, recompute_activations
from penjing.model.value_head import ScalarHead
from penjing.objective.base import Objective
from penjing.objective.distill import Distill, Distillation
from penjing.objective.next_token import NextToken
from penjing.objective.policy import Policy, PolicyObjective
from penjing.objective.preference import Preference, PreferenceObjective
from penjing.objective.reward_model import RewardModel, RewardObjective
from penjing.optim.router_bias_update import RouterBalance
from penjing.plan.hardware import compute_dtype
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import Disguise
from penjing.plan.memory.host_rss import at_more_rows, measured_process_bytes, peak_at_more_rows, process_plan
from penjing.plan.memory.report import MemoryPlan, plan_from
from penjing.plan.memory.sharded_memory import Layout, share
from penjing.plan.memory.trace import Trace, Tracer
from penjing.train.config import Run
from penjing.train.loop import Parts, step
from penjing.train.memory_trace.batches import make_batch, tensors_of
from penjing.train.memory_trace.dummy_batches import NoMeter, StandInSource, TraceEngine, on_target
from penjing.train.run_dir import start_shape
from penjing.train.stages.preference import frozen_copy, groups_of_pass, score

META = torch.device("meta")
_attention: Any = attention  # modules that are written to here
# Lines of these files are the head's and the loss's.
LOSS_FILES = ("penjing/kernels/fused_", "penjing/objective/")
STEPS = 2  # the first makes the optimizer's state, the second has it from its first line on
CPU_ROWS = (4, 8)
NOT_TRACED_ON_CPU = "data files that are mapped are not counted; the heap's waste is an estimate"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a run's step its trace depends on beside the settings.

    micro_rows: rows (pairs, prompts) of one forward pass on one device. accumulate: forward passes of a step that are
    traced; more than two change nothing. scored_fraction: share of the positions that reach the head, at most.
    document_tokens: length of a document where documents are packed; 0 = as long as a row.
    """

    micro_rows: int
    accumulate: int = 1
    ranks: int = 1
    layout: Layout = "single"
    scored_fraction: float = 1.0
    document_tokens: int = 0


def shape_of(
    run: Run,
    target: Target,
    *,
    micro_rows: int | None = None,
    ranks: int = 1,
    engine: Layout = "single",
    scored_fraction: float = 1.0,
) -> Shape:
    """The shape of a run's step on `ranks` devices. Raises UserError if the rows do not divide evenly."""
    # As `stage.micro_units`: on one CPU half of the share, where that is even.
    cut = target.kind == "cpu" and run.batch.rows % 2 == 0
    rows = micro_rows or run.batch.micro_rows or max(1, run.batch.rows // max(ranks, 2 if cut else 1))
    if micro_rows is None and run.batch.rows % (rows * ranks):
        raise UserError(
            "the rows of a step do not divide evenly",
            where="batch.rows",
            got=run.batch.rows,
            wanted=f"a multiple of {ranks} devices x {rows} rows",
        )
    passes = max(1, run.batch.rows // (rows * ranks))
    layout: Layout = "ddp" if ranks > 1 and engine == "single" else engine
    return Shape(
        micro_rows=rows, accumulate=min(2, passes), ranks=ranks, layout=layout, scored_fraction=scored_fraction
    )


def predict_memory(
    run: Run,
    target: Target,
    *,
    micro_rows: int | None = None,
    ranks: int = 1,
    engine: Layout = "single",
    scored_fraction: float = 1.0,
    process_bytes: int | None = None,
) -> MemoryPlan:
    """What the run's step takes of `target`, per rank. No device, no data and no weights are needed.

    micro_rows: rows of one forward pass; None = as the run says. engine: how `ranks` share the work. process_bytes: of
    a CPU, what the process holds without tensors; None = measured in a process of its own.
    Raises UserError for what cannot be traced.
    """
    shape = shape_of(run, target, micro_rows=micro_rows, ranks=ranks, engine=engine, scored_fraction=scored_fraction)
    if target.kind == "cpu":
        return _on_cpu(run, target, shape, measured_process_bytes() if process_bytes is None else process_bytes)
    trace, notes = trace_run(run, target, shape)
    sharing = share(trace, shape.layout, shape.ranks, largest_block_bytes(run.model))
    return plan_from(
        sharing.trace, target, communication_bytes=sharing.communication_bytes, notes=(*notes, *sharing.notes)
    )


def _on_cpu(run: Run, target: Target, shape: Shape, process_bytes: int) -> MemoryPlan:
    """On a CPU the model works piece by piece, and tracing takes time in proportion to the rows: few are traced."""

    def traced(rows: int) -> tuple[Trace, tuple[str, ...]]:
        return trace_run(run, target, replace(shape, micro_rows=rows))

    def plan(trace: Trace, notes: tuple[str, ...], place: int | None = None) -> MemoryPlan:
        return process_plan(
            trace,
            target,
            process_bytes=process_bytes,
            saved_bytes=_copied_bytes(run, trace),
            place=place,
            notes=(*notes, NOT_TRACED_ON_CPU),
        )

    low, high = CPU_ROWS
    if shape.micro_rows <= high:
        return plan(*traced(shape.micro_rows))
    few, more = traced(low), traced(high)
    first, second = peak_at_more_rows(few[0], more[0], CPU_ROWS, shape.micro_rows)
    found = at_more_rows(plan(*few, first), plan(*more, second), CPU_ROWS, shape.micro_rows)
    fits = found.total_bytes <= target.memory_bytes if target.memory_bytes else None
    return replace(found, fits=fits)


def _copied_bytes(run: Run, trace: Trace) -> int:
    """What a checkpoint written in the background is copied into first: trained weights and optimizer state."""
    if run.save.how != "background":
        return 0
    # Weights are born when they are named; what else is called weights are copies in another dtype.
    return sum(
        storage.num_bytes
        for storage in trace.storages
        if storage.component == "optimizer state"
        or (storage.component in ("weights", "master weights") and storage.operation == storage.component)
    )


def largest_micro_rows(
    run: Run,
    target: Target,
    budget_bytes: int | None = None,
    *,
    ranks: int = 1,
    engine: Layout = "single",
    scored_fraction: float = 1.0,
    most: int = 4096,
) -> int:
    """The most rows of one forward pass whose step fits `budget_bytes` (None: the target's memory); 0 if none does.

    Found by tracing: memory grows nearly on a line with the rows, which says where to look next. At most `most`.
    """
    total = budget_bytes or target.memory_bytes
    if not total:
        raise UserError("the card's memory is not known", where="budget", next_step="Give a budget, such as 24GB.")
    limited, known = replace(target, memory_bytes=total), dict[int, int]()

    def fits(rows: int) -> bool:
        plan = predict_memory(
            run, limited, micro_rows=rows, ranks=ranks, engine=engine, scored_fraction=scored_fraction
        )
        if plan.fits:
            known[rows] = plan.total_bytes
        return bool(plan.fits)

    if not fits(1):
        return 0
    good, bad, missed = 1, most + 1, False
    while bad - good > 1:
        low = max((rows for rows in known if rows < good), default=0)
        if not low:
            guess = 4
        elif missed:
            guess = bad - max(1, (bad - good) // 8)
        else:
            guess = good + (total - known[good]) * (good - low) // max(1, known[good] - known[low])
        guess = min(max(guess, good + 1), bad - 1)
        missed = not fits(guess)
        good, bad = (good, guess) if missed else (guess, bad)
    return good


def largest_block_bytes(config: ModelConfig) -> tuple[int, int]:
    """Parameters of the largest part that is gathered at once: (of a block, of the largest of blocks and tables)."""
    with torch.device(META):
        model = Transformer(config)
    block = max(sum(p.numel() for p in part.parameters()) for part in model.blocks)
    return block, max(block, model.embed.weight.numel())


# --- the parts -------------------------------------------------------------------------------------------------------


def trace_run(run: Run, target: Target, shape: Shape) -> tuple[Trace, tuple[str, ...]]:
    """The trace of STEPS steps and a validation between them, and what had to be assumed."""
    notes = [] if shape.scored_fraction < 1 else ["every position is taken to be learned from, the most there can be"]
    device = torch.device(target.kind)
    dtype = target_dtype(run, target)
    with Disguise(target), torch.device(META):
        model, trained = build(run, dtype)
        set_compute_dtype(trained, None if dtype == torch.float32 else dtype)
        if run.compute.float8 != "off":
            require_float8(target.kind, target.capability, dtype)
            use_float8(model)
    tracer = Tracer(
        vocabulary=run.model.vocabulary_size, loss_files=LOSS_FILES, kernel_temporaries=target.kind == "cuda"
    )
    with tracer, on_target(target, shape.document_tokens):
        tracer.tag_model(trained, dtype)
        objective, reference_given, _held = _objective(run, model, trained, dtype, tracer, notes)

        def make() -> Any:
            return make_batch(
                run,
                shape.micro_rows,
                shape.scored_fraction,
                reference_given=reference_given,
                on_cuda=target.kind == "cuda",
            )

        engine = TraceEngine(tracer, torch.device(device), shape.layout, shape.ranks)
        wrapped = engine.wrap(trained)
        optimizers: list[Any] = run.optimizer.build(trained)
        if run.model.is_mixture:
            optimizers.append(RouterBalance(model, 0.0 if run.lora.rank else run.router.bias_rate, engine.add))
        source = StandInSource(make, tracer, run.data.prefetch)
        given: dict[str, Any] = dict(
            engine=engine,
            model=wrapped,
            objective=objective,
            source=source,
            optimizers=optimizers,
            schedule=run.schedule,
            meter=NoMeter(),
            num_steps=STEPS,
            accumulate=shape.accumulate,
            clip_norm=run.clip_norm,
        )
        rest: dict[str, Any] = {
            field.name: None for field in fields(Parts) if field.default is MISSING and field.name not in given
        }
        parts = Parts(**given, **rest)
        # On a CPU, where freed memory has no history, the optimizer's state is made by itself and one step is enough.
        if target.kind == "cpu":
            _make_state(trained, optimizers, tracer)
        for index in range(1 if target.kind == "cpu" else STEPS):
            tracer.mark(f"step {index + 1}")
            tracer.phase = "forward"
            step(parts, index)
            tracer.tag_state(optimizers)
            if index == 0:
                tracer.mark("validation")
                _validate(run, shape, tracer, objective, wrapped, reference_given, target.kind == "cuda")
    if target.kind == "cuda" and getattr(run.compute, "compile", "off") != "off":
        notes.append("traced as it runs without torch.compile, which mostly takes less")
    if run.model.is_mixture:
        notes.append("tokens are taken to spread evenly over experts")
    if isinstance(run.objective, Policy):
        notes.append("the step is traced, the writing of answers is not")
    return tracer.trace, tuple(notes)


def target_dtype(run: Run, target: Target) -> torch.dtype:
    """The dtype of the products, as `assemble` chooses it; `auto` on a GPU by its architecture."""
    if run.compute.dtype != "auto" or target.kind == "cpu":
        return compute_dtype(run.compute.dtype, torch.device("cpu"))
    return torch.bfloat16 if target.capability >= (8, 0) else torch.float16


def build(run: Run, dtype: torch.dtype) -> tuple[Transformer, nn.Module]:
    """The decoder and what is trained (the same, or a module around it), in the order of `assemble`."""
    model = Transformer(run.model)
    if run.lora.rank:
        adapt(model, run.lora, seed=derive(run.seed, "lora"))
    freeze(model, run.freeze)
    recompute_activations(model, run.compute.recompute)
    if run.lora.rank:
        keep_base_in(model, dtype)
    settings = run.objective
    if isinstance(settings, RewardModel) and model.head is not None:
        model.head.requires_grad_(False)
    scalar = isinstance(settings, RewardModel) or (isinstance(settings, Policy) and settings.loss == "ppo")
    return model, ScalarHead(model) if scalar else model


def _objective(
    run: Run, model: Transformer, trained: nn.Module, dtype: torch.dtype, tracer: Tracer, notes: list[str]
) -> tuple[Objective, bool, Transformer | None]:
    """The run's objective with its reference or teacher, whether batches bring the reference's opinion along, and a
    model that is held beside it without being part of the step.
    """
    settings, router = run.objective, run.router
    biased = run.model.architecture == "glm4_moe"
    if isinstance(settings, Preference):
        kind = settings.reference if settings.needs_reference else "none"
        if kind == "auto":  # as the stage chooses; without data, a whole epoch or more is what `steps=0` says
            kind = "precomputed" if not run.steps else "adapter_off" if run.lora.rank else "copy"
            notes.append(f"the reference is taken to be {kind.replace('_', ' ')} (objective.reference)")
        scorer = _scorer(kind, run, model, dtype, tracer)
        return PreferenceObjective(settings, scorer, router, biased=biased), kind == "precomputed", None
    if isinstance(settings, RewardModel):
        return RewardObjective(settings, router, biased=biased), False, None
    if isinstance(settings, Policy):
        copied = settings.kl_weight > 0 and (settings.reference == "copy" or not run.lora.rank)
        held = _copy_of_start(run, dtype, tracer) if copied else None  # scores answers once they are written
        return PolicyObjective(settings, router, biased=biased), False, held
    if isinstance(settings, Distill):
        teacher = None
        if settings.mode != "top_k":
            with torch.device(META):
                teacher = Transformer(_teacher_shape(run, settings, notes)).requires_grad_(False).eval()
            keep_base_in(teacher, dtype)
            set_compute_dtype(teacher, None if dtype == torch.float32 else dtype)
            tracer.tag_model(teacher)
        num_ids = run.model.vocabulary_size
        return Distillation(settings, teacher, router, num_ids=num_ids, biased=biased), False, None
    return NextToken(router, biased=biased), False, None


def _scorer(
    kind: str, run: Run, model: Transformer, dtype: torch.dtype, tracer: Tracer
) -> Callable[[AnswerBatch], Tensor] | None:
    if kind == "adapter_off":

        def without_adapter(batch: AnswerBatch) -> Tensor:
            with using(model, None):
                return score(model, batch)

        return without_adapter
    if kind != "copy":
        return None
    copied = _copy_of_start(run, dtype, tracer)
    return lambda batch: score(copied, batch)


def _copy_of_start(run: Run, dtype: torch.dtype, tracer: Tracer) -> Transformer:
    """The model that a run begins from, held beside the one that learns."""
    with torch.device(META):
        base = Transformer(run.model)
        set_compute_dtype(base, None if dtype == torch.float32 else dtype)
        strip(base)
    copied = frozen_copy(base, dtype)
    del base
    tracer.tag_model(copied)
    return copied


def _teacher_shape(run: Run, settings: Distill, notes: list[str]) -> ModelConfig:
    if settings.teacher:
        return start_shape(settings.teacher)
    notes.append("no teacher is named: it is taken to be of the student's shape")
    return run.model


# --- the step --------------------------------------------------------------------------------------------------------


def _make_state(model: nn.Module, optimizers: list[Any], tracer: Tracer) -> None:
    """Let the optimizers make their state, from gradients of no origin."""
    with tracer.during("optimizer"):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tracer.tag_state(optimizers)


def _validate(
    run: Run,
    shape: Shape,
    tracer: Tracer,
    objective: Objective,
    model: Callable[..., Any],
    reference_given: bool,
    on_cuda: bool,
) -> None:
    """A forward pass on held-out rows, as the stages do it."""
    if isinstance(run.objective, Policy):
        return  # held-out prompts are answered
    rows = shape.micro_rows if run.objective.kind in ("next_token", "distill") else groups_of_pass(run)
    rows = max(1, min(rows, run.validate.rows))
    with tracer.during("evaluate"), torch.no_grad():
        batch = make_batch(run, rows, shape.scored_fraction, reference_given=reference_given, on_cuda=on_cuda)
        tracer.tag(tensors_of(batch), "batch")
        objective(model, batch)
