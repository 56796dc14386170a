"""Write a checkpoint: into a temporary folder, synced, renamed into place; only then are old ones removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import disk_error, sync_folder, write_json
from penjing.checkpoint.manifest import OPTIMIZERS, STATE, WEIGHTS, folder_name, steps, write_manifest


def save(
    folder: Path,
    step: int,
    *,
    weights: dict[str, Tensor],
    optimizers: list[dict[str, Any]],
    state: dict[str, Any],
    texts: dict[str, str],
    keep: int,
) -> Path:
    """Write `folder/step-NNNNNNNN` and return it, then remove all but the newest `keep` checkpoints (1 or more).

    weights: the model's whole state (float32). optimizers: `state_dict()` of each. state: JSON values (position in the
    data, totals). texts: further files by name. torch's CPU random state is written too.
    Raises UserError if the disk refuses; what was there before stays, and nothing half-written is left.
    """
    assert keep >= 1
    final = folder / folder_name(step)
    partial = folder / f".{final.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in folder.glob(".step-*.partial"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
        partial.mkdir()
        write_tensors(partial / WEIGHTS, weights)
        tensors, plain = flatten_optimizers(optimizers)
        write_tensors(partial / OPTIMIZERS, {**tensors, "rng.torch": torch.get_rng_state()})
        write_json(partial / STATE, {**state, "step": step, "optimizers": plain})
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        for path in partial.iterdir():
            _sync(path)
        write_manifest(partial, {"step": step})
        shutil.rmtree(final, ignore_errors=True)  # there only if it was damaged and its steps were taken again
        partial.rename(final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(error, final) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in steps(folder)[keep:]:
        shutil.rmtree(folder / folder_name(old), ignore_errors=True)
    return final


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raises UserError if the disk refuses (the library's own error is no OSError)."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(whole, path, metadata=metadata)
    except safetensors.SafetensorError as error:
        raise UserError(
            f"cannot write: {error}", where=path, next_step="Nothing that was there before is lost."
        ) from error


def _sync(path: Path) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def flatten_optimizers(optimizers: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Optimizer states as (tensors by name, JSON values): `0.12.exp_avg` is parameter 12 of the first optimizer.

    `Checkpoint.optimizers` undoes it.
    """
    tensors: dict[str, Tensor] = {}
    plain = []
    for number, optimizer in enumerate(optimizers):
        numbers: dict[str, Any] = {}
        for parameter, values in optimizer["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"{number}.{parameter}.{name}"] = value.detach().cpu()
                else:
                    numbers[f"{parameter}.{name}"] = value
        plain.append({"state": numbers, "param_groups": json.loads(json.dumps(optimizer["param_groups"]))})
    return tensors, plain
