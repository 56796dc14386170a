"""The only place that changes a run's settings, and records why.

`start_run` builds the settings: recipe, then what was requested, then what follows from the start model. `resolve`
then is one ordered pass over RULES, for training and for plans; they differ in the facts only. The records are
`Run.decisions`: printed before step 1, and comments in run.toml.
"""

import math
import os
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from penjing.base import config
from penjing.base.config import Decision, Layer
from penjing.base.errors import UserError
from penjing.base.formatting import gibibytes
from penjing.model.config import ModelConfig
from penjing.parallel import RESHARDING
from penjing.plan.shape import shape_of
from penjing.track.run_dir import checkpoint_path, is_run_or_checkpoint, stage_folder
from penjing.train.config import Run
from penjing.train.load_model import read_settings, start_shape, start_tokenizer
from penjing.train.stages import settings_classes

NONE = "none"  # eval.questions=none: no questions are asked
# Settings that may differ from those of `init_from`: they serve longer texts and do not change a weight's shape.
FREE = ("preset", "max_position_embeddings", "sliding_window", "sliding_window_layers")
FREE_PREFIX = "rope_"
LARGEST_RATE = 0.01  # a reward model with adapters learned at 0.01 and diverged at 0.03
EPOCH_STEPS = 25  # least steps of an epoch, if there are that many rows
ROW_MULTIPLE = 8
WHOLE_SHARE = 0.1  # of a device's memory, for whole float32 weights and gradients where a rank could do with parts
AS_STARTED = "as the run was started"


# --- the records ------------------------------------------------------------------------------------------------------


def with_settings(run: Run, values: Mapping[str, Any]) -> Run:
    """The run with other values, by dotted name, without a record: a copy, or what a plan tries."""
    for path, value in values.items():
        run = _with(run, path, value)
    return run


def _with(settings: Any, path: str, value: Any) -> Any:
    name, _, inner = path.partition(".")
    return replace(settings, **{name: _with(getattr(settings, name), inner, value) if inner else value})


def decide(run: Run, field: str, now: Any, why: str) -> Run:
    """The run with a setting decided, and the record; unchanged if the setting has that value."""
    return run if attrgetter(field)(run) == now else with_settings(record(run, field, now, why), {field: now})


def record(run: Run, field: str, now: Any, why: str) -> Run:
    """The run with the record alone: the setting stays, so that another machine decides anew."""
    return replace(run, decisions=(*run.decisions, Decision(field, attrgetter(field)(run), now, why)))


# --- with what is known of device and data ----------------------------------------------------------------------------


class Facts:
    """What the rules ask, each once and in this order. Training looks, a plan assumes."""

    world = 1  # devices

    def machine(self) -> Mapping[str, tuple[Any, str]]:
        """What this machine makes of settings that are left to it, by dotted name, and why."""
        return {}

    def started(self) -> Mapping[str, tuple[Any, str]]:
        """The settings of the checkpoint to resume from, by dotted name, and why each was decided; empty: a new run."""
        return {}

    def dtype(self, run: Run) -> tuple[str, str]:
        """What `compute.dtype` means on the device, and why."""
        raise NotImplementedError

    def conversations(self, run: Run) -> tuple[int, int] | None:
        """Tokens of all training conversations, and of the longest one, held-out ones included; None: unknown."""
        raise NotImplementedError

    def units_per_epoch(self, run: Run) -> int | None:
        """Rows (pairs, prompts) to learn from; None: unknown."""
        raise NotImplementedError

    def strategy_of(self, run: Run) -> tuple[str, str]:
        """What `parallel.strategy=auto` means, and why; empty: unknown."""
        return "", ""

    def memory_bytes(self) -> int:
        """Of a device, or of a CPU's process; 0: unknown."""
        return 0

    def micro_size(self, run: Run) -> tuple[int, str]:
        """Rows of a forward pass that fit in memory, and why; 0: as many as the settings say."""
        return 0, ""


def resolve(run: Run, facts: Facts) -> Run:
    """The settings that a run is trained with: each rule decides by the facts and by what was decided before."""
    for rule in RULES:
        run = rule(run, facts)
    return run


def _machine(run: Run, facts: Facts) -> Run:
    for setting, (used, why) in facts.machine().items():
        if attrgetter(setting)(run) in ("auto", 0):
            run = record(run, setting, used, why)
    return run


def _as_started(run: Run, facts: Facts) -> Run:
    """A run whose batch depends on the data is resumed with the batch that it was started with."""
    started = facts.started()
    for group, least, chosen in (("batch", "min_steps", "size"), ("data", "min_seq_len", "seq_len")):
        value, why = started.get(f"{group}.{chosen}", (None, ""))
        if attrgetter(f"{group}.{least}")(run) and isinstance(value, int):
            run = decide(run, f"{group}.{chosen}", value, why)
            run = decide(run, f"{group}.{least}", 0, f"{group}.{chosen} is decided")
    return run


def _dtype(run: Run, facts: Facts) -> Run:
    return decide(run, "compute.dtype", *facts.dtype(run))


def _row_length(run: Run, facts: Facts) -> Run:
    lengths = facts.conversations(run)
    return run if lengths is None else fit_rows(run, *lengths)


def fit_rows(run: Run, num_tokens: int, longest: int) -> Run:
    """Rows so short that few conversations fill several of them.

    num_tokens: of all training conversations. longest: tokens of the longest conversation, including held-out ones.
    """
    data = run.data
    if not data.min_seq_len:
        return run
    if data.format == "chats" and not run.max_steps:
        fill = int(num_tokens / max(EPOCH_STEPS, run.batch.min_steps / run.epochs))
        shortest = -(-(longest + 1) // ROW_MULTIPLE) * ROW_MULTIPLE
        length = max(data.min_seq_len, fill // ROW_MULTIPLE * ROW_MULTIPLE, shortest)
        why = f"{num_tokens:,} tokens are to fill several rows; the longest conversation has {longest:,}"
        run = decide(run, "data.seq_len", min(data.seq_len, length), why)
    return decide(run, "data.min_seq_len", 0, "data.seq_len is decided")


def _batch_size(run: Run, facts: Facts) -> Run:
    units = facts.units_per_epoch(run)
    return run if units is None else fit_batch(run, units, facts.world)


def fit_batch(run: Run, units_per_epoch: int, world: int = 1) -> Run:
    """As many rows per step as the data allow.

    units_per_epoch: rows (pairs, prompts) to learn from. world: devices; the batch size does not depend on it, except
    that each device gets a row. A run with `max_steps` keeps its batch size.
    """
    batch = run.batch
    if batch.min_steps and not run.max_steps:
        rows = step_rows(
            batch.size,
            units_per_epoch,
            steps_of_batch_1=run.epochs * units_per_epoch,
            min_steps=batch.min_steps,
            multiple=_multiple(run, world),
        )
        why = f"{units_per_epoch:,} an epoch, for {batch.min_steps} steps or more and {EPOCH_STEPS} an epoch"
        run = decide(run, "batch.size", rows, why)
    return decide(run, "batch.min_steps", 0, "batch.size is decided")


def step_rows(largest: int, units_per_epoch: int, *, steps_of_batch_1: float, min_steps: int, multiple: int = 1) -> int:
    """Rows of an optimizer step: `largest`, or the largest power of two with which a run takes `min_steps` steps and an
    epoch EPOCH_STEPS; at least 1, and a multiple of `multiple`."""
    fit = min(units_per_epoch // EPOCH_STEPS, steps_of_batch_1 / min_steps)
    if fit >= largest:
        return largest
    rows = 1 << (max(1, int(fit)).bit_length() - 1)
    return min(largest, math.ceil(rows / multiple) * multiple)


def _multiple(run: Run, world: int) -> int:
    """The batch size must be a multiple of this: the rows of one pass on every device."""
    indivisible = run.objective.indivisible_units
    return world * (run.batch.micro_size or (2 * indivisible if indivisible > 1 else 1))  # 2: the passes on a CPU


def _strategy(run: Run, facts: Facts) -> Run:
    name, why = facts.strategy_of(run) if run.parallel.strategy == "auto" else ("", "")
    return record(run, "parallel.strategy", name, why) if name else run


def _reshard(run: Run, facts: Facts) -> Run:
    """fsdp2 that `auto` chose has little memory, and so has a run with offload."""
    parallel = run.parallel
    if parallel.reshard != "auto":
        if parallel.strategy not in ("auto", *RESHARDING):
            got, wanted = f"parallel.strategy={parallel.strategy}", ", ".join(RESHARDING)
            raise parallel.error("reshard", "has an effect where passes exchange gradients", got=got, wanted=wanted)
        return run
    if parallel.strategy not in RESHARDING or parallel.offload or facts.world == 1:
        return run
    whole, free = 8 * shape_of(run.model).parameters, facts.memory_bytes()
    if whole > WHOLE_SHARE * free:
        return run
    why = f"whole weights and gradients take {gibibytes(whole)} of {gibibytes(free)}, and are exchanged once a step"
    return decide(run, "parallel.reshard", "step", why)


def _micro_size(run: Run, facts: Facts) -> Run:
    rows, why = facts.micro_size(run)
    return decide(run, "batch.micro_size", rows, why) if rows else run


RULES: tuple[Callable[[Run, Facts], Run], ...] = (
    _machine,
    _as_started,
    _dtype,
    _row_length,
    _batch_size,
    _strategy,
    _reshard,
    _micro_size,
)


# --- from recipe, requests and start model ----------------------------------------------------------------------------


def start_run(base: Layer, layers: Sequence[Layer]) -> Run:
    """The settings of a recipe with the requested ones; with `init_from`, the shape is that of the initial model.

    base: the recipe; layers: the requested settings, of which the last has priority.
    """
    start = str(next((layer["init_from"] for layer in reversed(layers) if layer.get("init_from")), ""))
    requested = {f"{group}.{name}" for layer in layers for group in layer for name in _table(layer, group)}
    if (folder := checkpoint_path(Path(start))) != Path(start):
        start = str(folder)
        layers = [*layers, {"init_from": start}]
    run = _from_pretrained(start, base, layers) if start else config.resolve(Run, base, *layers)
    run = _rate(run, base, layers)
    for setting, automatic in (
        ("batch.size", "batch.min_steps"),
        ("batch.size", "data.min_seq_len"),
        ("data.seq_len", "data.min_seq_len"),
    ):
        if setting in requested and automatic not in requested:
            run = decide(run, automatic, 0, f"{setting} is set")
    source = "" if start or "model.vocab_size" in requested else run.objective.vocab_source
    return decide(run, "model.vocab_size", start_shape(source).vocab_size, f"as {source}") if source else run


def _from_pretrained(start: str, base: Layer, layers: Sequence[Layer]) -> Run:
    """The settings of a run that starts from the model `start`: that model's shape, a vocabulary of at least its
    tokenizer's size, and its questions.

    Raises UserError naming a setting that contradicts the weights.
    """
    requested = _requested(layers)
    shape = start_shape(start, requested)
    all_layers = [base, {"model": config.to_dict(shape)}, *layers]
    # A short seq_len, so that a setting that contradicts the weights is reported before rows that are too long.
    _check(config.resolve(Run, *all_layers, {"data": {"seq_len": 8}}).model, shape, start)
    run, recipe = config.resolve(Run, *all_layers), config.resolve(Run, base)
    if run.model != recipe.model:
        shape_of = Decision("model", recipe.model.preset, f"that of {start}", "its weights have this shape")
        run = replace(run, decisions=(shape_of,))
    tokenizer = start_tokenizer(run)
    if "vocab_size" not in requested and tokenizer is not None:
        size = max(shape.vocab_size, tokenizer.size)
        run = decide(run, "model.vocab_size", size, f"its tokenizer has {tokenizer.size:,} ids")
    if not run.eval.questions and run.objective.generates_text:
        run = decide(run, "eval.questions", questions_of_start(start), f"those of {start}")
    return run


def _rate(run: Run, base: Layer, layers: Sequence[Layer]) -> Run:
    """The learning rate of the requested loss and of adapters, if the layers request one of these and no optimizer or
    rate.

    For adapters it is unchanged if the recipe itself has them. It never changes Muon's, whose step size does not depend
    on the gradient's.
    """
    named = any({"name", "learning_rate", ""} & _table(layer, "optimizer").keys() for layer in layers)
    if named or base["optimizer"]["name"] != "adamw":
        return run
    kind = base.get("objective", {}).get("name", "next_token")
    objective = next(settings() for settings in settings_classes() if settings().name == kind)
    recipe_rate, loss = run.optimizer.learning_rate, str(_last(layers, "objective", "loss"))
    rate = recipe_rate * objective.loss_rate_factors.get(loss, 1.0)
    why = f"objective.loss={loss}"
    if str(_last(layers, "lora", "rank") or 0) != "0" and "lora" not in base:
        rate, why = max(rate, min(objective.adapter_rate_factor * rate, LARGEST_RATE)), "adapters need a larger one"
    return run if rate == recipe_rate else decide(run, "optimizer.learning_rate", float(f"{rate:.3g}"), why)


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
