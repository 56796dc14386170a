"""Average models of one shape into one. Run: penjing average runs/a runs/b --out runs/mean"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from penjing.base import config
from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.checkpoint.average import average
from penjing.checkpoint.load import Checkpoint
from penjing.checkpoint.manifest import damage, folder_name, steps
from penjing.checkpoint.save import save
from penjing.model.lora import Lora
from penjing.train.run_dir import RunFolder, Trained, is_run, load_trained, read_settings, same_model, stage_folder


@dataclass(frozen=True, slots=True)
class Member:
    """One model of an average: what it is called, and how its weights are read."""

    name: str
    read: Callable[[], dict[str, Tensor]]


def average_models(paths: Sequence[Path], out: Path, *, weights: Sequence[float] = (), last: int = 0) -> list[str]:
    """Write the average as a run's folder, which chat, eval, export and `start=` take; returns the members' names.

    paths: runs, checkpoints, or models from outside. weights: what each counts; empty: all the same. last: of one run,
    its newest so many checkpoints instead of the newest alone.
    Raises UserError if shapes or tokenizers differ, or `out` is there already.
    """
    if out.exists():
        raise UserError("is there already", where=out, next_step="Choose another --out.")
    if last and len(paths) != 1:
        raise UserError("takes one run", where="--last", got=f"{len(paths)} models")
    first = load_trained(paths[0], adapters="merged")
    members = _newest(paths[0], last) if last else [_member(path, first) for path in paths]
    if len(members) < 2:
        raise UserError("nothing to average", got=f"{len(members)} model", wanted="at least two, or --last N")
    state = average([(member.name, member.read) for member in members], weights)
    folder = RunFolder(out)
    names = [member.name for member in members]
    step = first.checkpoint.step
    try:
        made = replace(first.run, out=str(out), stage="average", start="", lora=Lora())
        write_text(folder.settings, config.to_toml(made))
        first.tokenizer.save(folder.tokenizer)
        about = {"data": "averaged", "averaged": names, "weights": list(weights)}
        save(folder.checkpoints, step, weights=state, optimizers=[], state=about, texts={}, keep=1)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return names


def _newest(path: Path, last: int) -> list[Member]:
    """The newest `last` checkpoints of a run. Raises UserError if there are fewer, or one is damaged."""
    if not is_run(path):
        raise UserError("--last takes the folder of a run", where=path)
    folder = RunFolder(stage_folder(path))
    if read_settings(folder.path).lora.rank:
        raise UserError("the checkpoints of this run hold an adapter only", where=path)
    there = steps(folder.checkpoints)[:last]
    if len(there) < last:
        raise UserError(
            "the run has fewer checkpoints",
            where=folder.path,
            got=len(there),
            wanted=last,
            next_step="Train with save.keep=N to keep more.",
        )
    members = []
    for step in there:
        place = folder.checkpoints / folder_name(step)
        wrong = damage(place)
        if wrong is not None:
            raise UserError(f"this checkpoint is damaged: {wrong}", where=place)
        members.append(Member(str(place), Checkpoint(place, step, ()).weights))
    return members


def _member(path: Path, first: Trained) -> Member:
    def read() -> dict[str, Tensor]:
        trained = load_trained(path, adapters="merged")
        _check_alike(path, trained, first)
        return trained.model.state_dict()

    return Member(str(path), read)


def _check_alike(path: Path, trained: Trained, first: Trained) -> None:
    """Raise UserError where the same numbers would mean something else."""
    if not same_model(trained.run.model, first.run.model):
        mine, other = config.to_dict(trained.run.model), config.to_dict(first.run.model)
        name = next(key for key in mine if key != "preset" and mine[key] != other[key])
        raise UserError(
            "another shape of model than the first", where=path, got=f"{name} {mine[name]}", wanted=other[name]
        )
    if trained.tokenizer.vocabulary_hash != first.tokenizer.vocabulary_hash:
        raise UserError("another tokenizer than the first's: its ids mean something else", where=path)
