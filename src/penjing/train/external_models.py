"""Models from other projects: a Hugging Face directory or hub name, or MiniMind's `.pth`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penjing.base.errors import UserError
from penjing.convert import hf, minimind
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalModel:
    """A model in another project's format. The weights are read lazily."""

    path: Path  # the directory, or the .pth file
    config: ModelConfig
    tokenizer_folder: Path | None  # None if none was found; a .pth file does not contain one
    read_weights: Callable[[], dict[str, Tensor]]  # by Penjing's names, float32, on the CPU

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises UserError if there is none."""
        if self.tokenizer_folder is None:
            raise UserError(
                "no tokenizer.json next to these weights",
                where=self.path,
                next_step="Give tokenizer.path=DIR in training, or put the tokenizer's files next to the weights.",
            )
        return Tokenizer.load(self.tokenizer_folder)


def read_external_model(name: str | Path, hints: Mapping[str, Any] | None = None) -> ExternalModel | None:
    """The model called `name` if it is in another project's format, else None; a hub name is downloaded.

    hints: requested settings of `model.*`, for weights that do not determine their full shape.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in minimind.SUFFIXES:
            raise UserError(
                "not a model",
                where=path,
                wanted="a run's folder, a Hugging Face directory or hub name, or a MiniMind .pth file",
            )
        return _read_minimind(path, hints or {})
    folder = hf.find_hf(str(name))
    if folder is None:
        return None
    return ExternalModel(
        path=folder,
        config=hf.read_config(folder),
        tokenizer_folder=folder if (folder / "tokenizer.json").is_file() else None,
        read_weights=lambda: hf.read_hf(folder).weights,
    )


def _read_minimind(path: Path, hints: Mapping[str, Any]) -> ExternalModel:
    tensors = minimind.read_tensors(path)
    config = minimind.infer_config(tensors, hints, path)
    return ExternalModel(
        path=path,
        config=config,
        tokenizer_folder=minimind.tokenizer_folder(path),
        read_weights=lambda: minimind.from_minimind(tensors, config, path)[0],
    )
