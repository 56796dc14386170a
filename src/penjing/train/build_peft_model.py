"""A run that trains adapters: its base is another run or model, which it names and knows by hash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.base.config import Layer
from penjing.base.errors import UserError
from penjing.base.seeds import derive
from penjing.checkpoint.load import Checkpoint
from penjing.model.lora import add_adapter, fingerprint, trainable_state_dict
from penjing.model.transformer import Transformer
from penjing.train.config import Run
from penjing.train.stages import settings_classes

LARGEST_RATE = 0.01  # a reward model with adapters learned at 0.01 and fell apart at 0.03


def build_adapted(
    run: Run, checkpoint: Checkpoint | None, load_base: Callable[[Run], Transformer]
) -> tuple[Transformer, dict[str, str]]:
    """The base with the run's adapter in use, and what the checkpoint says of the base (`init_from`, `sha256`).

    load_base: the model to begin with, by the run's settings. Without a checkpoint the adapter is fresh. Raises
    UserError if there is no base, or it is not the one that the adapter was begun on.
    """
    if not run.init_from:
        raise UserError(
            "adapters need a trained model to sit on",
            where="init_from",
            wanted="a run, or a Hugging Face directory",
            next_step="Give init_from=RUN, or lora.rank=0 to train all weights.",
        )
    known = dict(checkpoint.state().get("base", {})) if checkpoint is not None else {}
    where: object = run.init_from if checkpoint is None else checkpoint.folder
    if "init_from" in known and not Path(run.init_from).exists() and Path(known["init_from"]).exists():
        run = replace(run, init_from=known["init_from"])  # it was named from another working folder
    try:
        model = load_base(run)
    except UserError as error:
        if checkpoint is None:
            raise
        raise UserError(
            f"the base of this adapter is not there ({error.line()})",
            where=where,
            wanted=known.get("init_from"),
            next_step="Put it back, or train anew.",
        ) from None
    start = Path(run.init_from)  # or a hub name
    base = {"init_from": str(start.resolve()) if start.exists() else run.init_from, "sha256": fingerprint(model)}
    if known and known["sha256"] != base["sha256"]:
        raise UserError(
            "the base of this adapter has changed since",
            where=where,
            got=f"{run.init_from} with hash {base['sha256'][:12]}",
            wanted=known["sha256"][:12],
            next_step="Put the old weights back, or train anew with another out=.",
        )
    add_adapter(model, run.lora, seed=derive(run.seed, "lora"))
    if checkpoint is not None:
        _restore(model, checkpoint)
    return model, base


def _restore(model: Transformer, checkpoint: Checkpoint) -> None:
    weights, expected = checkpoint.weights(), trainable_state_dict(model)
    # Where the model was trained inside a module with a head of its own, the head is not its business.
    weights = {name.removeprefix("model."): weights[name] for name in weights if name.startswith("model.")} or weights
    for name in sorted(weights.keys() | expected.keys()):
        got = tuple(weights[name].shape) if name in weights else None
        wanted = tuple(expected[name].shape) if name in expected else None
        if got != wanted:
            raise UserError(
                "the adapter is of another shape",
                where=checkpoint.folder,
                got=f"{name} {got}",
                wanted=f"{name} {wanted}",
            )
    model.load_state_dict(weights, strict=False)


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
    table = layer.get(name, {})
    return table if isinstance(table, Mapping) else {"": table}
