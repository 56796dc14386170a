"""What a teacher predicted, on disk: at each position of a data set the k likeliest ids, and how likely they are.

A folder holds `ids.bin` (uint16 or uint32, [S, k], likeliest first), `logps.bin` (float16, [S, k + 1]: the logarithm of
each id's chance, and last that of all other ids together) and `teacher.json`, written last. S positions are those that
count in the loss of a shard folder, document after document. 2 (2 k + 1) bytes a position up to 65,536 ids.

float16 keeps 11 bits: a stored chance of e^-8 is off by 0.2 % at most, the likely ones by less; the reader makes them
sum to 1 again.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.files import check_free_space, disk_error, disk_errors, read_json, sha256_text, write_json
from penjing.data.packing.concat import FixedRows, Row
from penjing.data.token_shards import FORMAT, ArrayFolder, TokenShards, file_facts, id_dtype, publish

META, PROGRESS = "teacher.json", "progress.json"
LOWEST = -60.0  # of a stored logarithm: a chance of 0 would make the reverse KL infinite

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """What a store was made from; another one of any of these is another store."""

    teacher: str  # SHA-256 of the weights
    data: str  # SHA-256 of the shards' tokens
    layout: str  # how documents were cut into rows: what a teacher sees before a position depends on it
    count: int  # k
    num_ids: int  # how many ids were chosen from
    temperature: float

    @property
    def name(self) -> str:
        return sha256_text(json.dumps(asdict(self), sort_keys=True))[:16]


# --- which position is which -----------------------------------------------------------------------------------------


class _Counting:
    """Stands for an array whose value at n is n."""

    def __getitem__(self, part: slice) -> IntArray:
        return np.arange(part.start, part.stop)


NOT_A_TOKEN = -1


def numbered(rows: FixedRows) -> FixedRows:
    """The same rows in the same order, with each token's place in the shards instead of its id; between documents and
    in padding there is NOT_A_TOKEN."""
    places = copy.copy(rows)
    places.shards = copy.copy(rows.shards)
    places.shards.token_N = cast(AnyArray, _Counting())
    places.end_of_text = NOT_A_TOKEN
    return places


def in_order(rows: FixedRows) -> FixedRows:
    """The same rows, in one order that is the same for every seed and epoch."""
    plain = copy.copy(rows)
    plain.order, plain._epoch = "fixed", -1
    return plain


class PositionSlots:
    """Where the prediction at a position of a row is stored."""

    def __init__(self, shards: TokenShards) -> None:
        self._end_D = shards.end_D
        self._before_N: IntArray | None = None
        if shards.weight_N is None:
            # A document of n tokens is read with an end-of-text token before it: n + 1 predictions.
            self.count = shards.num_tokens + shards.num_documents
        else:
            taught_N = np.cumsum(shards.weight_N, dtype=np.int64)
            self._before_N = taught_N - shards.weight_N
            self.count = int(taught_N[-1]) if len(taught_N) else 0

    def of(self, row: Row) -> IntArray:
        """The slots of a row of `numbered` rows, at its positions of weight above 0."""
        counts = row.weight_T > 0
        input_N, target_N = row.ids_T[counts], row.target_T[counts]
        if self._before_N is not None:
            slots: IntArray = self._before_N[target_N]
            return slots
        is_token = target_N != NOT_A_TOKEN
        # The last prediction of a document is of no token of it: it is the one after that of its last token.
        place_N = np.where(is_token, target_N, input_N)
        document_N = np.searchsorted(self._end_D, place_N, side="right")
        found: IntArray = place_N + document_N + ~is_token
        return found


# --- the files -------------------------------------------------------------------------------------------------------


def _layout(key: CacheKey, slots: int) -> dict[str, tuple[np.dtype[Any], tuple[int, int]]]:
    """dtype and shape of each file."""
    return {
        "ids.bin": (id_dtype(key.num_ids), (slots, key.count)),
        "logps.bin": (np.dtype(np.float16), (slots, key.count + 1)),
    }


def _arrays(folder: Path, key: CacheKey, slots: int, mode: Any) -> tuple[AnyArray, AnyArray]:
    ids, logps = (
        np.memmap(folder / name, dtype=dtype, mode=mode, shape=shape) if slots else np.zeros(shape, dtype)
        for name, (dtype, shape) in _layout(key, slots).items()
    )
    return ids, logps


def _reserve(path: Path, size: int) -> None:
    """Make a file of `size` bytes that the disk has room for: a mapped one that runs out of it ends the process."""
    with open(path, "wb") as stream:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)


class TeacherLogitsCache(ArrayFolder):
    """A finished folder, memory-mapped."""

    meta_file, holds = META, "predictions of a teacher"

    def __init__(self, folder: Path, key: CacheKey) -> None:
        """Raises UserError if the folder holds another store, or a file is not as long as it was."""
        super().__init__(folder)
        if self.meta.get("key") != asdict(key):
            raise UserError(
                "a teacher's predictions of something else",
                where=self.folder,
                next_step="Remove the folder, or choose another objective.store.",
            )
        self.key, self.slots = key, int(self.meta["slots"])
        self._ids, self._logps = _arrays(self.folder, key, self.slots, "r")

    def read(self, slot_N: IntArray) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """id_NK and logp_NJ of these slots."""
        return self._ids[slot_N].astype(np.int64), self._logps[slot_N].astype(np.float32)


def find(folder: Path, key: CacheKey) -> TeacherLogitsCache | None:
    """The store of `key` below `folder`, or None if it is not there or not finished."""
    place = Path(folder) / key.name
    return TeacherLogitsCache(place, key) if (place / META).is_file() else None


class TeacherLogitsWriter:
    """Fills a store, by several processes if need be: one calls `begin` and `finish`, each calls `write`.

    Until `finish` only `NAME.partial` exists; one that was left by a kill is gone on with.
    """

    def __init__(self, folder: Path, key: CacheKey, slots: int) -> None:
        self.folder, self.key, self.slots = Path(folder) / key.name, key, slots
        self.partial = self.folder.with_name(key.name + ".partial")

    def begin(self) -> int:
        """Make the files, or take up those that are there; returns the rows that are done."""
        sizes = {
            name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in _layout(self.key, self.slots).items()
        }
        with disk_errors(self.partial):
            there = all((self.partial / name).is_file() for name in (*sizes, PROGRESS))
            if there and all((self.partial / name).stat().st_size == size for name, size in sizes.items()):
                return int(read_json(self.partial / PROGRESS)["rows"])
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        try:
            check_free_space(self.partial, sum(sizes.values()))
            for name, size in sizes.items():
                _reserve(self.partial / name, size)
        except OSError as error:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise disk_error(error, self.partial) from error
        self.note(0)
        return 0

    def open(self) -> None:
        """Map the files that `begin` made."""
        with disk_errors(self.partial):
            self._ids, self._logps = _arrays(self.partial, self.key, self.slots, "r+")

    def write(self, slot_N: IntArray, id_NK: AnyArray, logp_NJ: AnyArray) -> None:
        self._ids[slot_N] = id_NK
        self._logps[slot_N] = np.maximum(logp_NJ, LOWEST)

    def flush(self) -> None:
        for array in (self._ids, self._logps):
            if isinstance(array, np.memmap):
                array.flush()

    def note(self, rows: int) -> None:
        """Say that so many rows are written, by all processes."""
        write_json(self.partial / PROGRESS, {"rows": rows})

    def finish(self, about: dict[str, Any]) -> TeacherLogitsCache:
        """Hash the files and give the folder its name."""
        with disk_errors(self.folder):
            files = file_facts(self.partial, _layout(self.key, self.slots))
            meta = {"format": FORMAT, "key": asdict(self.key), "slots": self.slots, **about, "files": files}
            write_json(self.partial / META, meta)
            (self.partial / PROGRESS).unlink()
        publish(self.partial, self.folder)
        return TeacherLogitsCache(self.folder, self.key)
