"""Write a checkpoint: into a temporary folder, synced, renamed into place; only then remove old checkpoints."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.base.files import NewFile, check_free_space, disk_errors, sync_folder
from penjing.checkpoint.manifest import MANIFEST, OPTIMIZERS, STATE, WEIGHTS, folder_name, manifest_text, steps
from penjing.checkpoint.parts import SharedFolder
from penjing.checkpoint.tensors import write_file

_TEXT_BYTES = 1 << 20


def save(
    where: Path | SharedFolder,
    step: int,
    *,
    weights: dict[str, Tensor],
    optimizers: list[dict[str, Any]],
    state: dict[str, Any],
    texts: dict[str, str],
    keep: int,
    stays: Callable[[int], bool] = lambda step: False,
    random_state: Tensor | None = None,
    fingerprints: Mapping[str, str] | None = None,
) -> Path:
    """Write `where/step-NNNNNNNN` and return it, then remove all but the newest `keep` checkpoints (1 or more).

    Checkpoints of later steps are always removed, whatever `keep` and `stays` say: they were damaged, and the run
    was resumed from an earlier one.

    where: the folder; with several writers (checkpoint/parts.py) the first one calls this, and waits for the others.
    weights: the model's full state dict (float32). optimizers: `state_dict()` of each. state: JSON values (position in
    the data, totals). texts: further files by name. stays: whether an older step's checkpoint is not removed.
    random_state: torch's; None = the current one. fingerprints: hashes of the run's inputs, for the manifest.
    Raises DiskError if the disk refuses; earlier checkpoints stay, and no partly written one is left.
    """
    assert keep >= 1
    shared = where if isinstance(where, SharedFolder) else None
    folder = where.path if isinstance(where, SharedFolder) else where
    final = folder / folder_name(step)
    partial = folder / f".{final.name}.partial"
    tensors, plain = flatten_optimizers(optimizers)
    tensors["rng.torch"] = torch.get_rng_state() if random_state is None else random_state
    plain_state = {**state, "step": step, "optimizers": plain}
    state_text = json.dumps(plain_state, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    text_files = {STATE: state_text, **texts}
    about = {"step": step, "fingerprints": dict(fingerprints or {})}
    try:
        with disk_errors(final):
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob(".step-*.partial"):
                if shared and f".{shared.mark}." in stale.name:
                    continue  # another rank is writing there
                shutil.rmtree(stale, ignore_errors=True)
            check_free_space(folder, _bytes(weights) + _bytes(tensors) + _TEXT_BYTES)
            partial.mkdir()
            tensor_files = {WEIGHTS: weights, OPTIMIZERS: tensors}
            if shared:
                files = shared.write(partial, tensor_files) | shared.collect(step, partial)
            else:
                files = {name: write_file(partial / name, content) for name, content in tensor_files.items()}
            files |= {name: _write(partial / name, text) for name, text in text_files.items()}
            _write(partial / MANIFEST, manifest_text(about, files))
            sync_folder(partial)  # its file names are durable before it gets its final name
            if final.exists():  # damaged, or its steps were repeated
                shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
            sync_folder(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in _expired(steps(folder), step, keep, stays):
        shutil.rmtree(folder / folder_name(old), ignore_errors=True)
    return final


def _expired(present: list[int], written: int, keep: int, stays: Callable[[int], bool]) -> list[int]:
    """The steps to remove from `present`, newest first: those after `written`, and those that are neither among the
    `keep` newest nor stay."""
    later = [step for step in present if step > written]
    return later + [step for step in present[len(later) + keep :] if not stays(step)]


def _write(path: Path, text: str) -> dict[str, Any]:
    with NewFile(path) as stream:
        stream.write(text.encode())
    return stream.facts()


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def flatten_optimizers(optimizers: list[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Optimizer states as (tensors by name, JSON values): `0.12.exp_avg` is parameter 12 of the first optimizer.

    `Checkpoint.optimizers` is the inverse.
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
