"""Read a Hugging Face directory or hub name: safetensors and JSON only; no code in it is ever executed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import read_json
from penjing.convert.names import from_hf, untie_if_head_differs
from penjing.convert.shape import config_from_hf
from penjing.model.config import ModelConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ALLOW_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


@dataclass(frozen=True, kw_only=True, slots=True)
class HFCheckpoint:
    """The contents of a Hugging Face directory, without the tokenizer (data/tokenizer/tokenizer.py reads that)."""

    folder: Path
    config: ModelConfig
    weights: dict[str, Tensor]  # our names, float32, on the CPU


def find_hf(name: str) -> Path | None:
    """The folder of `name`: a directory in Hugging Face's format, or the download of a hub name; None if it is neither.
    Raises UserError if it looks like a hub name and cannot be downloaded."""
    path = Path(name)
    if (path / CONFIG).is_file():
        return path
    return None if path.exists() or not _HUB_NAME.match(name) else _fetch(name)


def _fetch(name: str) -> Path:
    """Download the files of a model that we read (never code), or find them in the hub library's cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        what = "no such folder; downloading a model by this name needs a package"
        hint = 'Install it: pip install "penjing[hub]". Or give the path of a folder.'
        raise UserError(what, where=name, next_step=hint) from None
    try:
        return Path(snapshot_download(name, allow_patterns=ALLOW_PATTERNS))
    except HFValidationError as error:
        raise UserError(f"no such folder, and not a name of the hub: {error}", where=name) from None
    # The library's network, access and not-found errors share no base class: some come from its HTTP client.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = f"no such folder, and the download failed: {reason[:200]}"
        hint = "Check the name and the network, or give the path of a folder."
        raise UserError(what, where=name, next_step=hint) from None


def read_config(folder: Path) -> ModelConfig:
    """The config of the model in a Hugging Face directory, the same as `read_hf` returns."""
    config = config_from_hf(_read_object(folder / CONFIG), folder / CONFIG)
    return untie_if_head_differs(Shards(folder), config)


def read_hf(folder: Path) -> HFCheckpoint:
    """Read config and weights of a Hugging Face directory. Raises UserError if the model class is not supported, a
    shard is missing, or the weights are pickled."""
    folder = Path(folder)
    config = config_from_hf(_read_object(folder / CONFIG), folder / CONFIG)
    weights, config = from_hf(Shards(folder), config, folder)
    return HFCheckpoint(folder=folder, config=config, weights=weights)


def _read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError("not a table", where=path, got=type(value).__name__)
    return value


class Shards(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files by name, memory-mapped and read one at a time. Raises UserError if
    there is no file, if a file of the index is missing, or if a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._file_by_tensor = self._index()
        for file in sorted(set(self._file_by_tensor.values())):
            self._handle(file)

    def _index(self) -> dict[str, str]:
        if (self.folder / WEIGHTS).is_file():
            return dict.fromkeys(self._handle(WEIGHTS).keys(), WEIGHTS)
        if not (self.folder / INDEX).is_file():
            raise self._no_weights()
        weight_map = _read_object(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError("names no tensors", where=self.folder / INDEX, wanted="a weight_map")
        for file in sorted(set(map(str, weight_map.values()))):
            if Path(file).name != file or not (self.folder / file).is_file():
                hint = "Download the folder again: every file in model.safetensors.index.json is needed."
                raise UserError("a weights file is missing", where=self.folder, got=f"no {file}", next_step=hint)
        return {str(name): str(file) for name, file in weight_map.items()}

    def _no_weights(self) -> UserError:
        pickled = [path.name for path in sorted(self.folder.glob("*.bin")) + sorted(self.folder.glob("*.pt*"))]
        if pickled:
            return UserError(
                "these weights are pickled, and loading a pickle can run any code",
                where=self.folder / pickled[0],
                wanted=WEIGHTS,
                next_step="Use the model's safetensors files. If you trust the model, load it with transformers and "
                "call save_pretrained.",
            )
        return UserError("no weights here", where=self.folder, wanted=f"{WEIGHTS} or {INDEX}")

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safetensors.safe_open(self.folder / file, framework="pt")
            except (safetensors.SafetensorError, OSError) as error:
                raise UserError(f"not a readable safetensors file: {error}", where=self.folder / file) from None
        return self._open[file]

    def __getitem__(self, name: str) -> Tensor:
        try:
            value: Tensor = self._handle(self._file_by_tensor[name]).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise UserError(
                f"the index names a tensor that its file lacks: {error}", where=self.folder / self._file_by_tensor[name]
            ) from None
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._file_by_tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_by_tensor)

    def __len__(self) -> int:
        return len(self._file_by_tensor)
