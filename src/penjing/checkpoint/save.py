"""Write a checkpoint: into a temporary folder, synced, renamed into place; only then are old ones removed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penjing.base.files import disk_error, sync_folder, write_json
from penjing.checkpoint.manifest import folder_name, steps, write_manifest


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
    """Write `folder/step-NNNNNNNN`, then remove all but the newest `keep` checkpoints.

    weights: the model's whole state (float32). optimizers: `state_dict()` of each. state: JSON values (position in the
    data, totals). texts: further files by name. Raises UserError if the disk refuses; what was there stays.
    """
    final = folder / folder_name(step)
    partial = folder / f".{final.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write_tensors(partial / "model.safetensors", weights)
        tensors, plain = flatten_optimizers(optimizers)
        _write_tensors(partial / "optimizer.safetensors", {**tensors, "rng.torch": torch.get_rng_state()})
        write_json(partial / "state.json", {**state, "step": step, "optimizers": plain})
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        for path in partial.iterdir():
            _sync(path)
        write_manifest(partial, {"step": step})
        sync_folder(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise disk_error(error, final) from error
    for old in steps(folder)[keep:]:
        shutil.rmtree(folder / folder_name(old), ignore_errors=True)
    return final


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _sync(path: Path) -> None:
    import os

    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


def flatten_optimizers(optimizers: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Optimizer states as (tensors by name, JSON values): `0.12.exp_avg` is parameter 12 of the first optimizer."""
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
