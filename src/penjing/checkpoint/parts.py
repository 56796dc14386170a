"""Checkpoints of large models: each rank writes the rows that it holds, and no rank gathers them.

A tensor's rows from FIRST on are the tensor NAME@FIRST of a rank's file. Whole tensors are in the first rank's.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import DiskError, disk_errors, sync_folder, write_json
from penjing.checkpoint.manifest import folder_name, part_name
from penjing.checkpoint.tensors import write_file
from penjing.devices.shards import local_part

WRITE_SECONDS = 1800.0  # the first rank waits so long for the files of the others
POLL_SECONDS = 0.1
FACTS, FAILED = "facts.json", "failed"


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """A folder of checkpoints in which `count` ranks write one together. number: of this one. mark: of this checkpoint,
    as an earlier attempt may have left files."""

    path: Path
    number: int
    count: int
    mark: str

    def write(self, folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Any]]:
        """Write this rank's files; returns their sizes and hashes."""
        names = {part_name(name, self.number, self.count): tensors for name, tensors in files.items()}
        return {name: write_file(folder / name, tensors) for name, tensors in names.items()}

    def _aside(self, step: int, number: int) -> Path:
        return self.path / f".{folder_name(step)}.{self.mark}.{number}.partial"

    def write_aside(self, step: int, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the files of a rank that is not the first, which collects them. Raises DiskError."""
        folder = self._aside(step, self.number)
        with disk_errors(self.path / folder_name(step)):
            self.path.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            try:
                facts = self.write(folder, files)
                sync_folder(folder)
                write_json(folder / FACTS, facts)
            except BaseException:
                os.rename(folder, folder.with_suffix(f".{FAILED}.partial"))  # takes no room
                raise

    def collect(self, step: int, into: Path) -> dict[str, dict[str, Any]]:
        """Move the other ranks' files into the first one's folder; returns their sizes and hashes."""
        found: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + WRITE_SECONDS
        for number in range(1, self.count):
            folder = self._aside(step, number)
            while not (folder / FACTS).is_file():
                failed = folder.with_suffix(f".{FAILED}.partial").exists()
                if failed or time.monotonic() > until:
                    raise DiskError("another rank could not write its part", where=self.path / folder_name(step))
                time.sleep(POLL_SECONDS)
            facts = json.loads((folder / FACTS).read_text())
            for name in facts:
                os.rename(folder / name, into / name)
            shutil.rmtree(folder, ignore_errors=True)
            found |= facts
        return found


class JoinedTensors(Mapping[str, Tensor]):
    """The tensors of several ranks' files, each read and joined when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises UserError for a file that is no safetensors file, or if rows are missing."""
        self._rows: dict[str, list[tuple[int, Any, str]]] = {}
        for path in files:
            try:
                handle = safetensors.safe_open(path, framework="pt")
            except (safetensors.SafetensorError, OSError, ValueError) as error:
                raise UserError(f"cannot be read as safetensors: {error}", where=path) from None
            for key in handle.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                name, _, first = key.partition("@")
                self._rows.setdefault(name, []).append((int(first or 0), handle, key))
        for name, rows in self._rows.items():
            rows.sort(key=lambda row: row[0])
            ends = [first + handle.get_slice(key).get_shape()[0] for first, handle, key in rows if "@" in key]
            if [first for first, _, _ in rows] != [0, *ends[:-1]]:
                raise UserError("rows are missing", where=files[0].parent, got=name)

    def __getitem__(self, name: str) -> Tensor:
        rows = [handle.get_tensor(key) for _, handle, key in self._rows[name]]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def own_rows(state: Any, first_row: Callable[[Tensor], int], first_rank: bool) -> Any:
    """State dicts with a rank's rows alone, under their names. first_row: of a tensor that is spread over ranks. Whole
    tensors the first rank keeps."""
    if isinstance(state, list):
        return [own_rows(one, first_row, first_rank) for one in state]
    if not isinstance(state, dict):
        return state
    own: dict[Any, Any] = {}
    for name, value in state.items():
        local = local_part(value) if isinstance(value, Tensor) else value
        if local is not value:
            own |= {f"{name}@{first_row(value)}": local} if len(local) else {}
        elif first_rank or not isinstance(value, Tensor):
            own[name] = own_rows(value, first_row, first_rank)
    return own
