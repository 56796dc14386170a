"""A run's model and optimizers: the same for training, its plan, the memory trace and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint
from penjing.model.freeze import freeze
from penjing.model.init import initialise
from penjing.model.lora import add_adapter
from penjing.model.transformer import Transformer, recompute_activations
from penjing.objective.base import Objective
from penjing.optim.router_bias_update import RouterBalance
from penjing.parallel.base import Strategy
from penjing.train.batch_geometry import BatchGeometry, batch_geometry
from penjing.train.config import Run
from penjing.train.load_model import build_adapted, load_start, load_weights
from penjing.train.precision import Precision
from penjing.train.stages.base import Stage


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """What is trained, with the weights that a run begins with."""

    model: Transformer
    trainable: nn.Module  # the model, or a module that holds it as `model` beside a head of its own
    base: dict[str, str]  # what a run's adapter sits on, `init_from` and `sha256`; empty without one


@dataclass(frozen=True, kw_only=True)
class BuiltRun(BuiltModel):
    """A run that could take a step, if it had batches."""

    run: Run
    stage: Stage[Any]
    strategy: Strategy
    precision: Precision
    geometry: BatchGeometry
    wrapped: Callable[..., Tensor]  # `trainable` as the strategy calls it
    objective: Objective
    optimizers: list[Any]  # torch optimizers and what else takes a step


def build_run(
    stage: Stage[Any], strategy: Strategy, precision: Precision, checkpoint: Checkpoint | None = None
) -> BuiltRun:
    """Model, objective and optimizers of `stage.run`, ready for a first step; nothing is trained.

    checkpoint: what the run goes on from; its weights are loaded here, the rest by the Checkpointer. The order of what
    is done here and in the two parts fixes all random draws and the order of the state dict: it must stay.
    """
    return complete(build_model(stage, precision, strategy.device, checkpoint), stage, strategy, precision, checkpoint)


def build_model(
    stage: Stage[Any], precision: Precision, device: torch.device, checkpoint: Checkpoint | None = None
) -> BuiltModel:
    """The first part. On the meta device no weights are read or drawn, and only shapes are right."""
    run = stage.run
    model, base = _shape_only(run) if device.type == "meta" else _with_weights(run, checkpoint)
    freeze(model, run.freeze)
    recompute_activations(model, run.compute.activation_checkpointing)
    if run.lora.rank:
        precision.cast_frozen(model)
    trainable = stage.trainable(model)
    trainable.to(device)
    precision.apply(trainable, model)
    return BuiltModel(model=model, trainable=trainable, base=base)


def complete(
    built: BuiltModel,
    stage: Stage[Any],
    strategy: Strategy,
    precision: Precision,
    checkpoint: Checkpoint | None = None,
) -> BuiltRun:
    """The second part: what a step needs beside the model."""
    run, trainable = stage.run, built.trainable
    stage.setup(trainable)
    if checkpoint is not None:
        load_weights(trainable, checkpoint)
    wrapped = strategy.wrap(trainable)
    optimizers: list[Any] = run.optimizer.build(trainable, derive(run.seed, "optimizer"))
    if run.model.is_mixture:
        rate = 0.0 if run.lora.rank else run.router.bias_update_rate  # a frozen base's routers stay as they are
        optimizers.append(RouterBalance(built.model, rate, strategy.all_reduce))
    return BuiltRun(
        **vars(built),
        run=run,
        stage=stage,
        strategy=strategy,
        precision=precision,
        geometry=batch_geometry(run, strategy.world, strategy.device),
        wrapped=wrapped,
        objective=stage.objective(),
        optimizers=optimizers,
    )


def _shape_only(run: Run) -> tuple[Transformer, dict[str, str]]:
    with torch.device("meta"):
        model = Transformer(run.model)
        if run.lora.rank:
            add_adapter(model, run.lora, seed=derive(run.seed, "lora"))
    return model, {}


def _with_weights(run: Run, checkpoint: Checkpoint | None) -> tuple[Transformer, dict[str, str]]:
    """The weights a run begins with, those of `init_from` or fresh ones; with adapters, what they sit on.

    A run that goes on reads its start again only where its objective compares with it.
    """
    if run.lora.rank:
        return build_adapted(run, checkpoint)
    if run.init_from and (checkpoint is None or run.objective.needs_start_weights):
        return load_start(run), {}
    model = Transformer(run.model)
    if checkpoint is None:
        initialise(model, derive(run.seed, "weights"))
    return model, {}
