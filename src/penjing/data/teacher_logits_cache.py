"""A teacher's top-k logits on disk: the k likeliest ids at each position of a data set, with log-probabilities.

A folder holds `ids.bin` (uint16 or uint32, [S, k], likeliest first), `logps.bin` (float16, [S, k + 1]: log-probability
of each id, then that of all other ids together) and `teacher.json`, written last. S is the number of positions with
loss in a shard folder, document after document. Size: 2 (2 k + 1) bytes per position for up to 65,536 ids.

float16 has 11 significant bits: a stored probability of e^-8 is off by at most 0.2 %, larger ones by less. The reader
normalizes them to sum to 1.
"""

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
from penjing.data.token_shards import FORMAT, ArrayFolder, TokenShards, id_dtype, manifest_entries, publish

META, PROGRESS = "teacher.json", "progress.json"
MIN_LOGPROB = -60.0  # a probability of 0 would make the reverse KL infinite

IntArray = npt.NDArray[np.int64]
AnyArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """The inputs of a cache; a change in any field gives another cache."""

    teacher: str  # SHA-256 of the weights
    data: str  # SHA-256 of the shards' tokens
    layout: str  # how documents are cut into rows, which decides the teacher's context
    count: int  # k
    num_ids: int  # size of the vocabulary
    temperature: float

    @property
    def name(self) -> str:
        return sha256_text(json.dumps(asdict(self), sort_keys=True))[:16]


# --- positions -------------------------------------------------------------------------------------------------------


class _IdentityArray:
    """An array whose value at n is n, without memory."""

    def __getitem__(self, part: slice) -> IntArray:
        return np.arange(part.start, part.stop)


NOT_A_TOKEN = -1


def with_positions(rows: FixedRows) -> FixedRows:
    """The same rows with each token's position in the shards instead of its id; NOT_A_TOKEN between documents and in
    padding."""
    positions = copy.copy(rows)
    positions.shards = copy.copy(rows.shards)
    positions.shards.token_N = cast(AnyArray, _IdentityArray())
    positions.end_of_text = NOT_A_TOKEN
    return positions


def fixed_order(rows: FixedRows) -> FixedRows:
    """The same rows, in an order that does not depend on seed or epoch."""
    fixed = copy.copy(rows)
    fixed.order, fixed._epoch = "fixed", -1
    return fixed


class PositionSlots:
    """Maps the positions of a row to slots of the cache."""

    def __init__(self, shards: TokenShards) -> None:
        self._end_D = shards.end_D
        self._scored_before_N: IntArray | None = None
        if shards.weight_N is None:
            # A document of n tokens follows an end-of-text token: n + 1 predictions.
            self.count = shards.num_tokens + shards.num_documents
        else:
            scored_N = np.cumsum(shards.weight_N, dtype=np.int64)
            self._scored_before_N = scored_N - shards.weight_N
            self.count = int(scored_N[-1]) if len(scored_N) else 0

    def of(self, row: Row) -> IntArray:
        """The slots of a row from `with_positions`, for its positions with weight above 0."""
        is_scored = row.weight_T > 0
        input_N, target_N = row.ids_T[is_scored], row.target_T[is_scored]
        if self._scored_before_N is not None:
            slots: IntArray = self._scored_before_N[target_N]
            return slots
        is_token = target_N != NOT_A_TOKEN
        # The last prediction of a document is the end-of-text token; its slot follows that of the last token.
        position_N = np.where(is_token, target_N, input_N)
        document_N = np.searchsorted(self._end_D, position_N, side="right")
        slot_N: IntArray = position_N + document_N + ~is_token
        return slot_N


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
    """Create a file of `size` bytes and allocate it on disk: a full disk under a mapped file would kill the process."""
    with open(path, "wb") as stream:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, size)
        else:
            stream.truncate(size)


class TeacherLogitsCache(ArrayFolder):
    """A finished folder, memory-mapped."""

    meta_file, noun = META, "predictions of a teacher"

    def __init__(self, folder: Path, key: CacheKey) -> None:
        """Raises UserError if the folder holds another cache, or a file has changed its size."""
        super().__init__(folder)
        if self.meta.get("key") != asdict(key):
            hint = "Remove the folder, or choose another objective.store."
            raise UserError("teacher logits of another teacher or data set", where=self.folder, next_step=hint)
        self.key, self.slots = key, int(self.meta["slots"])
        self._ids, self._logps = _arrays(self.folder, key, self.slots, "r")

    def read(self, slot_N: IntArray) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """id_NK and logp_NJ of these slots."""
        return self._ids[slot_N].astype(np.int64), self._logps[slot_N].astype(np.float32)


def find(folder: Path, key: CacheKey) -> TeacherLogitsCache | None:
    """The cache of `key` below `folder`, or None if it is missing or unfinished."""
    path = Path(folder) / key.name
    return TeacherLogitsCache(path, key) if (path / META).is_file() else None


class TeacherLogitsWriter:
    """Writes a cache from one or several processes: one calls `begin` and `finish`, each calls `write`.

    Until `finish` only `NAME.partial` exists; a later run continues it after a kill.
    """

    def __init__(self, folder: Path, key: CacheKey, slots: int) -> None:
        self.folder, self.key, self.slots = Path(folder) / key.name, key, slots
        self.partial = self.folder.with_name(key.name + ".partial")

    def begin(self) -> int:
        """Create the files, or continue the existing ones; returns the number of finished rows."""
        sizes = {
            name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in _layout(self.key, self.slots).items()
        }
        with disk_errors(self.partial):
            is_started = all((self.partial / name).is_file() for name in (*sizes, PROGRESS))
            if is_started and all((self.partial / name).stat().st_size == size for name, size in sizes.items()):
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
        """Memory-map the files that `begin` created."""
        with disk_errors(self.partial):
            self._ids, self._logps = _arrays(self.partial, self.key, self.slots, "r+")

    def write(self, slot_N: IntArray, id_NK: AnyArray, logp_NJ: AnyArray) -> None:
        self._ids[slot_N] = id_NK
        self._logps[slot_N] = np.maximum(logp_NJ, MIN_LOGPROB)

    def flush(self) -> None:
        for array in (self._ids, self._logps):
            if isinstance(array, np.memmap):
                array.flush()

    def note(self, rows: int) -> None:
        """Record the number of rows written by all processes."""
        write_json(self.partial / PROGRESS, {"rows": rows})

    def finish(self, about: dict[str, Any]) -> TeacherLogitsCache:
        """Hash the files and give the folder its name."""
        with disk_errors(self.folder):
            files = manifest_entries(self.partial, _layout(self.key, self.slots))
            meta = {"format": FORMAT, "key": asdict(self.key), "slots": self.slots, **about, "files": files}
            write_json(self.partial / META, meta)
            (self.partial / PROGRESS).unlink()
        publish(self.partial, self.folder)
        return TeacherLogitsCache(self.folder, self.key)
