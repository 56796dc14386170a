"""Find and read checkpoints: the newest undamaged one, verified by hash before any tensor is used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import read_json, sha256_file, sha256_text
from penjing.checkpoint.delivered import choose
from penjing.checkpoint.manifest import OPTIMIZERS, STATE, WEIGHTS, damage, folder_name, steps, tensor_files
from penjing.checkpoint.parts import JoinedTensors

RANDOM_STATE = "rng.torch"  # among the optimizers' tensors


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. `skipped` lists those that were preferred but are damaged, each with its damage."""

    folder: Path
    step: int
    skipped: tuple[str, ...]

    def weights(self) -> Mapping[str, Tensor]:
        """The model's full state dict, on the CPU."""
        return self._tensors(WEIGHTS)

    def weight_files(self) -> list[Path]:
        """The file of the weights, or those of several ranks."""
        return _files(self.folder, WEIGHTS)

    def _tensors(self, name: str) -> Mapping[str, Tensor]:
        files = _files(self.folder, name)
        return read_tensors(files[0]) if files == [self.folder / name] else JoinedTensors(files)

    def state(self) -> dict[str, Any]:
        """The saved JSON values, with `step` and the optimizers' values that are not tensors."""
        return dict(read_json(self.folder / STATE))

    def optimizers(
        self, fit: Callable[[int, int, dict[str, Any]], dict[str, Any]] = lambda optimizer, parameter, values: values
    ) -> tuple[list[dict[str, Any]], Tensor]:
        """Each optimizer's input for `load_state_dict`, and torch's random state.

        fit: makes of the tensors of a parameter, by the numbers of optimizer and parameter, what is kept of them.
        """
        tensors = self._tensors(OPTIMIZERS)
        names: dict[tuple[int, int], dict[str, str]] = {}
        for name in tensors.keys() - {RANDOM_STATE}:
            optimizer, parameter, field = name.split(".", 2)
            names.setdefault((int(optimizer), int(parameter)), {})[field] = name
        restored = []
        for number, plain in enumerate(self.state()["optimizers"]):
            state: dict[int, dict[str, Any]] = {
                one: fit(number, one, {field: tensors[name] for field, name in sorted(fields.items())})
                for (optimizer, one), fields in sorted(names.items())
                if optimizer == number
            }
            for name, value in plain["state"].items():
                parameter, field = name.split(".", 1)
                state.setdefault(int(parameter), {})[field] = value
            restored.append({"state": state, "param_groups": plain["param_groups"]})
        return restored, tensors[RANDOM_STATE]


def _files(folder: Path, name: str) -> list[Path]:
    return [folder / file for file in tensor_files([path.name for path in folder.iterdir()], name)]


def weights_sha256(folder: Path) -> str:
    """The hash of a checkpoint's weights; of several ranks' files that of their hashes."""
    hashes = [sha256_file(path) for path in _files(folder, WEIGHTS)]
    return hashes[0] if len(hashes) == 1 else sha256_text(" ".join(hashes))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises UserError if the file is not one; the library checks the header before
    it allocates memory."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot be read as safetensors: {error}", where=path) from None
    return tensors


def newest(folder: Path) -> Checkpoint | None:
    """The newest undamaged checkpoint in `folder`, or None if there is no checkpoint.

    Raises UserError if every checkpoint is damaged, so that a run never starts anew by accident.
    """
    skipped: list[str] = []
    for step in steps(folder):
        problem = damage(folder / folder_name(step))
        if problem is None:
            return Checkpoint(folder / folder_name(step), step, tuple(skipped))
        skipped.append(f"{folder_name(step)}: {problem}")
    if skipped:
        raise UserError("every checkpoint is damaged: " + "; ".join(skipped), where=folder)
    return None


def delivered(folder: Path) -> Checkpoint | None:
    """The checkpoint that is used where nothing else is said: the newest undamaged one, or the one of the lowest
    held-out loss (checkpoint/delivered.py). Raises UserError as `newest` does."""
    last = newest(folder)
    step = choose(last.state().get("best", {}), last.step).step if last else 0
    if last is None or step == last.step:
        return last
    path = folder / folder_name(step)
    if problem := damage(path):
        return replace(last, skipped=(*last.skipped, f"{path.name}: {problem}"))
    return Checkpoint(path, step, last.skipped)
