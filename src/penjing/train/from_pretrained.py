"""Begin with a model that is there: its shape, its tokenizer, and what may be set otherwise; the rate of adapters."""

from __future__ import annotations

import os
import typing
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.base import config
from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.model.config import ModelConfig
from penjing.train.config import Run
from penjing.train.load_model import read_settings, start_shape, start_tokenizer
from penjing.train.run_dir import is_run_or_checkpoint, stage_folder
from penjing.train.stages import settings_classes

# What may be set beside `init_from`: none of it changes a weight's shape, and all of it is meant for longer texts.
NONE = "none"  # eval.questions=none: no questions are asked
FREE = ("preset", "max_position_embeddings", "sliding_window", "sliding_window_layers")
FREE_PREFIX = "rope_"
LARGEST_RATE = 0.01  # a reward model with adapters learned at 0.01 and fell apart at 0.03


def begin_from(start: str, base: Layer, layers: Sequence[Layer]) -> Run:
    """The settings of a run that begins with `start`: that model's shape, room for its tokenizer's tokens, and the
    questions it is known by.

    base: the recipe; layers: what was asked for, the last first in rank. Raises UserError naming the setting if one
    contradicts the weights.
    """
    requested = _requested(layers)
    shape = start_shape(start, requested)
    begun = [base, {"model": config.to_dict(shape)}, *layers]
    # Rows too long for the model come second: what contradicts the weights is the mistake to name.
    _check(config.resolve(Run, *begun, {"data": {"seq_len": 8}}).model, shape, start)
    run = config.resolve(Run, *begun)
    tokenizer = start_tokenizer(run)
    if "vocab_size" not in requested and tokenizer is not None:
        size = max(shape.vocab_size, tokenizer.size)
        run = replace(run, model=replace(run.model, vocab_size=size))
    if not run.eval.questions:
        run = replace(run, eval=replace(run.eval, questions=questions_of_start(start)))
    return run


def with_vocabulary(run: Run, layers: Sequence[Layer]) -> Run:
    """The settings of a run that begins from nothing: where its objective compares with another model's predictions,
    it has as many ids as that one, unless a layer says how many."""
    named = any("vocab_size" in _table(layer, "model") for layer in layers)
    if named or not run.objective.vocab_source:
        return run
    size = start_shape(run.objective.vocab_source).vocab_size
    return replace(run, model=replace(run.model, vocab_size=size))


def adapter_rate(base: Layer, layers: Sequence[Layer]) -> Layer:
    """The recipe `base` with a rate for adapters, where the layers ask for them and name no optimizer or rate.

    A recipe that has adapters of its own knows its rate, and Muon's steps have one size whatever the gradient's.
    """
    ranks = [_table(layer, "lora").get("rank") for layer in layers]
    rank = next((rank for rank in reversed(ranks) if rank is not None), 0)
    named = any({"name", "learning_rate", ""} & _table(layer, "optimizer").keys() for layer in layers)
    optimizer = dict(base["optimizer"])
    if str(rank) == "0" or named or "lora" in base or optimizer["name"] != "adamw":
        return base
    kind = base.get("objective", {}).get("name", "next_token")
    objective = next(settings() for settings in settings_classes() if settings().name == kind)
    whole = float(optimizer["learning_rate"])
    rate = max(whole, min(objective.adapter_rate_factor * whole, LARGEST_RATE))
    return {**base, "optimizer": {**optimizer, "learning_rate": float(f"{rate:.3g}")}}


def _table(layer: Layer, name: str) -> Mapping[str, Any]:
    """What a layer says of a group of settings; a lone value, such as that of `model=26m`, under the empty name."""
    table = layer.get(name, {})
    return table if isinstance(table, Mapping) else {"": table}


def _requested(layers: Sequence[Layer]) -> dict[str, Any]:
    """The settings of `model.*` that the layers name, a preset's among them, as values of their types."""
    types, requested = typing.get_type_hints(ModelConfig), dict[str, Any]()
    for layer in layers:
        table = _table(layer, "model")
        preset = table.get("preset", table.get(""))
        if isinstance(preset, str):
            requested |= ModelConfig.named(preset)
        for name, value in table.items():
            if name in types:
                requested[name] = config.convert(types[name], value, f"model.{name}")
    return requested


def _check(model: ModelConfig, shape: ModelConfig, start: str) -> None:
    """Raise UserError for the first setting that contradicts the weights to begin with."""
    wanted, got = config.to_dict(shape), config.to_dict(model)
    for name, value in wanted.items():
        if got[name] == value or name in FREE or name.startswith(FREE_PREFIX):
            continue
        if name == "vocab_size" and got[name] > value:
            continue  # rows are added
        raise UserError(
            f"contradicts the shape of {start}",
            where=f"model.{name}",
            got=got[name],
            wanted=f"at least {value}" if name == "vocab_size" else value,
            next_step="Leave it out: a run that begins with weights has their shape.",
        )


def questions_of_start(start: str) -> str:
    """The file of questions by which the model of a run is known; empty where it names none, or is no run."""
    if not start or not is_run_or_checkpoint(Path(start)):
        return ""
    folder = stage_folder(Path(start))
    run = read_settings(folder)
    named = run.eval.questions
    if named in ("", NONE):
        return named
    beside = folder / os.path.relpath(named, run.out)  # where the run was moved together with its data
    for file in (beside, Path(named)):
        if file.is_file():
            return os.path.normpath(file)
    warnings.warn(f"the questions that {folder} is known by are not there, and are not asked: {named}", stacklevel=2)
    return ""
