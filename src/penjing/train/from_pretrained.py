"""Settings of a run that starts from an existing model: its shape, its vocabulary, its questions; adapters' rate."""

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
from penjing.track.run_dir import is_run_or_checkpoint, stage_folder
from penjing.train.config import Run
from penjing.train.load_model import read_settings, start_shape, start_tokenizer
from penjing.train.stages import settings_classes

NONE = "none"  # eval.questions=none: no questions are asked
# Settings that may differ from those of `init_from`: they serve longer texts and do not change a weight's shape.
FREE = ("preset", "max_position_embeddings", "sliding_window", "sliding_window_layers")
FREE_PREFIX = "rope_"
LARGEST_RATE = 0.01  # a reward model with adapters learned at 0.01 and diverged at 0.03


def start_from_pretrained(start: str, base: Layer, layers: Sequence[Layer]) -> Run:
    """The settings of a run that starts from the model `start`: that model's shape, a vocabulary of at least its
    tokenizer's size, and its questions.

    base: the recipe; layers: the requested settings, of which the last has priority. Raises UserError naming a setting
    that contradicts the weights.
    """
    requested = _requested(layers)
    shape = start_shape(start, requested)
    all_layers = [base, {"model": config.to_dict(shape)}, *layers]
    # A short seq_len, so that a setting that contradicts the weights is reported before rows that are too long.
    _check(config.resolve(Run, *all_layers, {"data": {"seq_len": 8}}).model, shape, start)
    run = config.resolve(Run, *all_layers)
    tokenizer = start_tokenizer(run)
    if "vocab_size" not in requested and tokenizer is not None:
        size = max(shape.vocab_size, tokenizer.size)
        run = replace(run, model=replace(run.model, vocab_size=size))
    if not run.eval.questions:
        run = replace(run, eval=replace(run.eval, questions=questions_of_start(start)))
    return run


def with_vocabulary(run: Run, layers: Sequence[Layer]) -> Run:
    """The settings of a run trained from scratch. If its objective compares with another model's predictions, it gets
    that model's vocabulary size, unless a layer sets one."""
    named = any("vocab_size" in _table(layer, "model") for layer in layers)
    if named or not run.objective.vocab_source:
        return run
    size = start_shape(run.objective.vocab_source).vocab_size
    return replace(run, model=replace(run.model, vocab_size=size))


def default_rate(base: Layer, layers: Sequence[Layer]) -> Layer:
    """The recipe `base` with the learning rate of the requested loss and of adapters, if the layers request one of
    these and no optimizer or rate.

    For adapters it is unchanged if the recipe itself has them. It never changes Muon's, whose step size does not depend
    on the gradient's.
    """
    named = any({"name", "learning_rate", ""} & _table(layer, "optimizer").keys() for layer in layers)
    optimizer = dict(base["optimizer"])
    if named or optimizer["name"] != "adamw":
        return base
    kind = base.get("objective", {}).get("name", "next_token")
    objective = next(settings() for settings in settings_classes() if settings().name == kind)
    recipe_rate = float(optimizer["learning_rate"])
    rate = recipe_rate * objective.loss_rate_factors.get(str(_last(layers, "objective", "loss")), 1.0)
    if str(_last(layers, "lora", "rank") or 0) != "0" and "lora" not in base:
        rate = max(rate, min(objective.adapter_rate_factor * rate, LARGEST_RATE))
    return base if rate == recipe_rate else {**base, "optimizer": {**optimizer, "learning_rate": float(f"{rate:.3g}")}}


def _last(layers: Sequence[Layer], group: str, name: str) -> Any:
    """The value of a setting in the last layer that has it, else None."""
    return next((table[name] for layer in reversed(layers) if name in (table := _table(layer, group))), None)


def _table(layer: Layer, name: str) -> Mapping[str, Any]:
    """A layer's settings of one group; a single value, such as in `model=26m`, has the empty name."""
    table = layer.get(name, {})
    return table if isinstance(table, Mapping) else {"": table}


def _requested(layers: Sequence[Layer]) -> dict[str, Any]:
    """The settings of `model.*` in the layers, including a preset's, converted to their types."""
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
    """Raise UserError for the first setting that contradicts the start weights."""
    expected, got = config.to_dict(shape), config.to_dict(model)
    for name, value in expected.items():
        if got[name] == value or name in FREE or name.startswith(FREE_PREFIX):
            continue
        if name == "vocab_size" and got[name] > value:
            continue  # rows are added to the embedding
        raise UserError(
            f"contradicts the shape of {start}",
            where=f"model.{name}",
            got=got[name],
            wanted=f"at least {value}" if name == "vocab_size" else value,
            next_step="Leave it out: a run has the shape of its start weights.",
        )


def questions_of_start(start: str) -> str:
    """The file of questions that a run's model can answer; empty if it has none or `start` is not a run."""
    if not start or not is_run_or_checkpoint(Path(start)):
        return ""
    folder = stage_folder(Path(start))
    run = read_settings(folder)
    named = run.eval.questions
    if named in ("", NONE):
        return named
    moved = folder / os.path.relpath(named, run.out)  # if the run was moved together with its data
    for file in (moved, Path(named)):
        if file.is_file():
            return os.path.normpath(file)
    warnings.warn(f"the questions of {folder} are missing and will not be asked: {named}", stacklevel=2)
    return ""
