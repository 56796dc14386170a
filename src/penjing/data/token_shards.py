"""Token ids on disk: one memory-mapped array, document boundaries beside it, and a checksum for each file.

A shard folder holds `tokens.bin` (uint16 or uint32, all documents one after the other), `ends.npy` (int64: end of each
document), `bytes.npy` (int32: UTF-8 bytes of each document's text, so that losses can be given per byte), `weights.bin`
(uint8 per token: weight in the loss; chats only) and `shards.json`, written last.
"""

import copy
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.files import disk_errors, read_json, sha256_file, sync_folder, write_json

FORMAT = 1
COPY_TOKENS = 1 << 20
Tokens = Sequence[int] | npt.NDArray[Any]
META = "shards.json"
Kind = Literal["documents", "chats"]
REMEDY = "Remove the folder: a run makes its own anew from the data."


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype for ids of this vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def manifest_entries(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Size and hash of each file, which `ArrayFolder` checks."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in names}


def publish(partial: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, durably, replacing an older one."""
    with disk_errors(folder):
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        sync_folder(folder.parent)


@dataclass(kw_only=True)
class FileRange:
    """The records of one file in a split."""

    name: str
    first: int  # index of its first record
    lowest: float  # of the records' places in the split, see `data/corpus.py`
    highest: float
    end: int = -1  # index after its last record; -1: unknown yet


class ArrayFolder:
    """A folder of memory-mapped arrays, with a file that lists their sizes and hashes."""

    meta_file: ClassVar[str]  # written last
    noun: ClassVar[str]  # the contents, in errors

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder has another format, or a file has the wrong size."""
        self.folder = Path(folder)
        if not (self.folder / self.meta_file).is_file():
            raise UserError(f"no token {self.noun} here", where=self.folder, wanted=f"a folder with {self.meta_file}")
        meta = read_json(self.folder / self.meta_file)
        version = meta.get("format") if isinstance(meta, dict) else None
        if version != FORMAT:
            raise UserError(f"{self.noun} of another format", where=self.folder, got=version, wanted=FORMAT)
        for name, entry in meta["files"].items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != entry["bytes"]:
                wanted = f"{entry['bytes']} bytes"
                raise UserError("file missing or cut short", where=path, got=size, wanted=wanted, next_step=REMEDY)
        self.meta: dict[str, Any] = meta

    def load(self, name: str) -> npt.NDArray[Any]:
        """A small array, read whole."""
        path = self.folder / f"{name}.npy"
        self.verify([path.name])
        try:
            return np.asarray(np.load(path))
        except Exception as error:  # a damaged header raises ValueError, SyntaxError, TokenError, EOFError ...
            raise UserError(f"the file is damaged: {error}", where=path) from None

    def map(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """A memory-mapped array with one entry per token."""
        if self.num_tokens == 0:
            return np.zeros(0, dtype)
        return np.memmap(self.folder / f"{name}.bin", dtype=dtype, mode="r")

    @property
    def num_tokens(self) -> int:
        return int(self.meta["tokens"])

    def verify(self, names: Iterable[str] = ()) -> None:
        """Hash these files again, or all; raises UserError naming the first that changed."""
        for name in names or self.meta["files"]:
            if sha256_file(self.folder / name) != self.meta["files"].get(name, {}).get("sha256"):
                what = "the file is not what was written (checksum differs)"
                raise UserError(what, where=self.folder / name, next_step=REMEDY)


class ArrayFolderWriter:
    """Writes an `ArrayFolder`: `add` the records, then `close`. Until then only `FOLDER.partial` exists."""

    def __init__(self, folder: Path, *, has_weights: bool, vocab_size: int, about: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.dtype, self.about = id_dtype(vocab_size), about
        self.num_tokens = self.num_records = 0
        self.files: list[FileRange] = []
        self._streams: dict[str, IO[bytes]] = {}
        with disk_errors(self.partial):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            for name in ["tokens.bin", "weights.bin"] if has_weights else ["tokens.bin"]:
                self._streams[name] = open(self.partial / name, "wb")

    def begin(self, file: str, place: float) -> None:
        """Note that the next record is of this file, with this place in the split (see `data/corpus.py`)."""
        if not self.files or self.files[-1].name != file:
            self.files.append(FileRange(name=file, first=self.num_records, lowest=place, highest=place))
        entry = self.files[-1]
        entry.lowest, entry.highest = min(entry.lowest, place), max(entry.highest, place)

    def append(self, ids: Tokens, weights: Tokens | None) -> None:
        with disk_errors(self.partial):
            self._streams["tokens.bin"].write(np.asarray(ids, dtype=self.dtype).tobytes())
            if "weights.bin" in self._streams:
                assert weights is not None and len(weights) == len(ids)
                self._streams["weights.bin"].write(np.asarray(weights, dtype=np.uint8).tobytes())
        self.num_tokens += len(ids)

    def finish(self, meta_file: str, arrays: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
        """Finish the files, then rename the folder to its final name, replacing an older one."""
        with disk_errors(self.partial):
            for stream in self._streams.values():
                stream.close()
            for name, values in arrays.items():
                np.save(self.partial / f"{name}.npy", values)
            files = manifest_entries(self.partial, [*self._streams, *(f"{name}.npy" for name in arrays)])
        counts = {"tokens": self.num_tokens, **counts, "files_read": [asdict(file) for file in self.files]}
        meta = {"format": FORMAT, "dtype": self.dtype.name, **counts, **self.about}
        write_json(self.partial / meta_file, {**meta, "files": files})
        publish(self.partial, self.folder)


class TokenShards(ArrayFolder):
    meta_file, noun = META, "shards"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kind: Kind = self.meta["kind"]
        self.end_D: npt.NDArray[np.int64] = self.load("ends")
        self.bytes_D: npt.NDArray[np.int32] = self.load("bytes")
        self.start_D = np.concatenate(([0], self.end_D[:-1])) if len(self.end_D) else self.end_D
        self.token_N: npt.NDArray[Any] = self.map("tokens", self.meta["dtype"])
        self.weight_N: npt.NDArray[np.uint8] | None = self.map("weights", "uint8") if self.kind == "chats" else None

    @property
    def num_documents(self) -> int:
        return len(self.end_D)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text before tokenization."""
        return int(self.bytes_D.sum(dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of tokens.bin: runs with the same fingerprint read the same tokens."""
        return str(self.meta["files"]["tokens.bin"]["sha256"])

    def files(self) -> dict[str, FileRange]:
        """The files of the documents, by name; empty for shards of older versions."""
        files = [FileRange(**entry) for entry in self.meta.get("files_read", [])]
        for file, first in zip(files, [*(after.first for after in files[1:]), self.num_documents], strict=False):
            file.end = first
        return {file.name: file for file in files}

    def sources(self) -> "list[tuple[str, int, TokenShards]]":
        """(name, first document, its documents) of each source that was named when the shards were made, in order."""
        files, found, begin = self.files(), [], 0
        for name, names in self.meta.get("sources", {}).get(self.meta.get("split"), []):
            end = max([begin, *(files[file].end for file in names if file in files)])
            found.append((name, begin, self._part(name, begin, end)))
            begin = end
        return found

    def _part(self, name: str, begin: int, end: int) -> "TokenShards":
        """The documents from `begin` to before `end`, as shards. name: for errors."""
        part = copy.copy(self)
        part.folder = Path(name)
        part.start_D, part.end_D = self.start_D[begin:end], self.end_D[begin:end]
        part.bytes_D = self.bytes_D[begin:end]
        part.meta = {**self.meta, "tokens": int(part.end_D[-1] - part.start_D[0]) if end > begin else 0}
        return part


class TokenShardWriter(ArrayFolderWriter):
    def __init__(self, folder: Path, *, kind: Kind, vocab_size: int, about: dict[str, Any]) -> None:
        super().__init__(folder, has_weights=kind == "chats", vocab_size=vocab_size, about=about)
        self.kind = kind
        self._ends: list[int] = []
        self._bytes: list[int] = []

    def add(self, ids: Tokens, num_bytes: int, weights: Sequence[int] | None = None) -> None:
        """Append one document of at least one token."""
        self.append(ids, weights)
        self._ends.append(self.num_tokens)
        self._bytes.append(num_bytes)
        self.num_records += 1

    def copy(self, shards: TokenShards, file: FileRange, name: str) -> None:
        """Append the documents of one file of other shards, with the same dtype; the file is called `name` now."""
        self.files.append(replace(file, name=name, first=self.num_records, end=-1))
        begin, end = int(shards.start_D[file.first]), int(shards.end_D[file.end - 1])
        self._ends += (shards.end_D[file.first : file.end] - begin + self.num_tokens).tolist()
        self._bytes += shards.bytes_D[file.first : file.end].tolist()
        self.num_records = len(self._ends)
        for first in range(begin, end, COPY_TOKENS):
            part = slice(first, min(end, first + COPY_TOKENS))
            self.append(shards.token_N[part], None if shards.weight_N is None else shards.weight_N[part])

    def close(self) -> TokenShards:
        arrays = {"ends": np.asarray(self._ends, np.int64), "bytes": np.asarray(self._bytes, np.int32)}
        counts = {"kind": self.kind, "documents": len(self._ends), "text_bytes": sum(self._bytes)}
        self.finish(META, arrays, counts)
        return TokenShards(self.folder)
