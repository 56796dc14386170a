"""A run's model and optimizers: the same for training, its plan, the memory trace and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penjing import devices
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint
from penjing.model.freeze import freeze
from penjing.model.init import initialise
from penjing.model.lora import add_adapter
from penjing.model.transformer import Transformer, recompute_activations
from penjing.objective.base import Objective
from penjing.optim.ema import Ema
from penjing.optim.ranks import ONE_RANK, Ranks
from penjing.optim.router_bias_update import RouterBalance
from penjing.parallel.base import Strategy
from penjing.plan.trainable import Trainable, trainable_of
from penjing.train.batch_geometry import BatchGeometry, batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import build_adapted, load_start, load_weights
from penjing.train.precision import Precision
from penjing.train.stages.base import Stage

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """The trained module, with the run's start weights."""

    model: Transformer
    trainable: nn.Module  # the model, or a module that contains it as `model` and has another head
    base: dict[str, str]  # the base model of a run's adapter, `init_from` and `sha256`; empty without an adapter


@dataclass(frozen=True, kw_only=True)
class BuiltRun(BuiltModel):
    """A run that is ready to take a step, except for its batches."""

    run: Run
    stage: Stage[Any]
    strategy: Strategy
    precision: Precision
    geometry: BatchGeometry
    wrapped: Callable[..., Tensor]  # `trainable` as the strategy calls it
    objective: Objective
    optimizers: list[Any]  # torch optimizers, and other objects with a `step`
    counts: Trainable  # of parameters, counted while the weights were whole


def build_run(
    stage: Stage[Any], strategy: Strategy, precision: Precision, checkpoint: Checkpoint | None = None
) -> BuiltRun:
    """Model, objective and optimizers of `stage.run`, ready for a first step.

    checkpoint: to resume from; its weights are loaded here, other state by the Checkpointer. The order of operations
    here and in the two parts fixes the random draws and the order of the state dict: do not change it.
    """
    device, run = strategy.device, stage.run
    if strategy.is_sharded and not run.objective.needs_start_weights:
        if strategy.wraps_shapes and not run.lora.rank:
            shapes = build_model(stage, precision, META)
            if shapes.trainable is shapes.model:
                return complete(shapes, stage, strategy, precision, checkpoint)
        device = devices.HOST  # `wrap` moves it block by block: the model may be larger than a device
    return complete(build_model(stage, precision, device, checkpoint), stage, strategy, precision, checkpoint)


def build_model(
    stage: Stage[Any], precision: Precision, device: torch.device, checkpoint: Checkpoint | None = None
) -> BuiltModel:
    """The first part. On the meta device the model has shapes, but no weights are read or drawn."""
    run = stage.run
    model, base = _shape_only(run) if device.type == "meta" else _with_weights(stage, checkpoint)
    freeze(model, run.freeze)
    recompute_activations(model, run.compute.activation_checkpointing)
    model.regularization = run.regularization
    if run.lora.rank:
        precision.cast_frozen(model)
    trainable = stage.trainable(model)
    trainable.to(device)
    precision.apply(trainable, model)
    return BuiltModel(model=model, trainable=trainable, base=base)


def complete(
    built: BuiltModel, stage: Stage[Any], strategy: Strategy, precision: Precision, checkpoint: Checkpoint | None = None
) -> BuiltRun:
    """The second part: what a step needs besides the model."""
    run, trainable = stage.run, built.trainable
    stage.setup(trainable)
    later = strategy.wraps_shapes and trainable is built.model and next(trainable.parameters()).is_meta
    if checkpoint is not None and not later:
        load_weights(trainable, checkpoint)
    counts = trainable_of(trainable, run.model)
    strategy.reshard = run.parallel.reshard
    wrapped = strategy.wrap(trainable)
    if later:
        _fill_parts(built.model, stage, strategy, checkpoint)
    # On GPUs nobody has run the exchange, nor compared it with the work that it saves.
    ranks: Ranks = strategy if devices.of(strategy.device).is_host else ONE_RANK
    optimizers: list[Any] = run.optimizer.build(trainable, derive(run.seed, "optimizer"), ranks)
    if run.model.is_mixture:
        optimizers.append(RouterBalance(built.model, run.router.bias_update_rate, strategy.all_reduce))
    geometry = batch_geometry(run, strategy.world, strategy.device)
    optimizers = strategy.adopt(optimizers, run, geometry)
    if run.ema_decay:  # last: it averages what the others have changed
        optimizers.append(Ema((one for one in trainable.parameters() if one.requires_grad), run.ema_decay))
    return BuiltRun(
        **vars(built),
        run=run,
        stage=stage,
        strategy=strategy,
        precision=precision,
        geometry=geometry,
        wrapped=wrapped,
        objective=stage.objective(),
        optimizers=optimizers,
        counts=counts,
    )


@torch.no_grad()
def _fill_parts(model: Transformer, stage: Stage[Any], strategy: Strategy, checkpoint: Checkpoint | None) -> None:
    """Give a wrapped model that had shapes only its weights, a tensor at a time. Those of `init_from` rank 0 reads."""
    run = stage.run
    if checkpoint is not None:
        load_weights(model, checkpoint, strategy.place)
    elif run.init_from:
        start = load_start(run).state_dict() if strategy.rank == 0 else {}
        for name, part in model.state_dict().items():
            whole = torch.empty(part.shape, dtype=part.dtype, device=strategy.device)
            strategy.broadcast_tensors([whole.copy_(start[name]) if start else whole], source=0)
            part.copy_(strategy.place(whole, part))
    else:
        initialise(model, derive(run.seed, "weights"), strategy.place, stage.initial_embedding())


def _shape_only(run: Run) -> tuple[Transformer, dict[str, str]]:
    with torch.device("meta"):
        model = Transformer(run.model)
        if run.lora.rank:
            add_adapter(model, run.lora, seed=derive(run.seed, "lora"))
    return model, {}


def _with_weights(stage: Stage[Any], checkpoint: Checkpoint | None) -> tuple[Transformer, dict[str, str]]:
    """A model with the run's start weights, of `init_from` or newly initialised; and the base of its adapters.

    A resumed run reads its start weights again only if its objective needs them.
    """
    run = stage.run
    if run.lora.rank:
        return build_adapted(run, checkpoint)
    if run.init_from and (checkpoint is None or run.objective.needs_start_weights):
        return load_start(run), {}
    model = Transformer(run.model)
    if checkpoint is None:
        initialise(model, derive(run.seed, "weights"), embedding_VD=stage.initial_embedding())
    return model, {}
