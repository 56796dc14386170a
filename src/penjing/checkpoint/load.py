"""Find and read checkpoints: the newest undamaged one, verified by hash before any tensor is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.checkpoint.manifest import OPTIMIZERS, STATE, WEIGHTS, damage, folder_name, steps


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint. `skipped` lists newer checkpoints that are damaged, each with its damage."""

    folder: Path
    step: int
    skipped: tuple[str, ...]

    def weights(self) -> dict[str, Tensor]:
        """The model's full state dict, on the CPU."""
        return read_tensors(self.folder / WEIGHTS)

    def state(self) -> dict[str, Any]:
        """The saved JSON values, with `step` and the optimizers' values that are not tensors."""
        return dict(read_json(self.folder / STATE))

    def optimizers(self) -> tuple[list[dict[str, Any]], Tensor]:
        """Each optimizer's input for `load_state_dict`, and torch's random state."""
        tensors = read_tensors(self.folder / OPTIMIZERS)
        random_state = tensors.pop("rng.torch")
        restored = []
        for number, plain in enumerate(self.state()["optimizers"]):
            state: dict[int, dict[str, Any]] = {}
            for name, tensor in tensors.items():
                optimizer, parameter, field = name.split(".", 2)
                if int(optimizer) == number:
                    state.setdefault(int(parameter), {})[field] = tensor
            for name, value in plain["state"].items():
                parameter, field = name.split(".", 1)
                state.setdefault(int(parameter), {})[field] = value
            restored.append({"state": state, "param_groups": plain["param_groups"]})
        return restored, random_state


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
