"""Token ids on disk: one memory-mapped array, document boundaries beside it, and a checksum for each file.

A shard folder holds `tokens.bin` (uint16 or uint32, all documents one after the other), `ends.npy` (int64: where each
document ends), `bytes.npy` (int32: UTF-8 bytes of each document's text, so that losses can be given per byte),
`weights.bin` (uint8 per token: does it count in the loss; chats only) and `shards.json`, written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from penjing.base.errors import UserError
from penjing.base.files import disk_error, read_json, sha256_file, sync_folder, write_json

FORMAT = 1
META = "shards.json"
Kind = Literal["documents", "chats"]


def read_meta(folder: Path, file: str, version: int, *, what: str) -> dict[str, Any]:
    """What a folder of token arrays says of itself. `what` names the kind in errors.

    Raises UserError if `file` is not there or of another format, or a file it lists has another size than was written.
    """
    if not (folder / file).is_file():
        raise UserError(f"no token {what} here", where=folder, wanted=f"a folder with {file}")
    meta = read_json(folder / file)
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != version:
        raise UserError(f"{what} of another format", where=folder, got=found, wanted=version)
    check_sizes(folder, meta)
    return dict(meta)


def check_sizes(folder: Path, meta: Mapping[str, Any]) -> None:
    """Raise UserError if a file that `meta` lists is not as long as it was written."""
    for name, facts in meta["files"].items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["bytes"]:
            raise UserError("file missing or cut short", where=path, got=size, wanted=f"{facts['bytes']} bytes")


def check_hashes(folder: Path, meta: Mapping[str, Any]) -> None:
    """Hash every file again; raises UserError naming the first that changed."""
    for name, facts in meta["files"].items():
        if sha256_file(folder / name) != facts["sha256"]:
            raise UserError("the file is not what was written (checksum differs)", where=folder / name)


def publish(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, in place of what was there, durably."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise disk_error(error, folder) from error


class TokenShards:
    """A shard folder, memory-mapped for reading."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder is not one of shards, or a file's size is not what was written."""
        self.folder = Path(folder)
        self.meta = read_meta(self.folder, META, FORMAT, what="shards")
        self.kind: Kind = self.meta["kind"]
        self.end_D: npt.NDArray[np.int64] = self._load("ends.npy")
        self.bytes_D: npt.NDArray[np.int32] = self._load("bytes.npy")
        self.start_D = np.concatenate(([0], self.end_D[:-1])) if len(self.end_D) else self.end_D
        self.token_N: npt.NDArray[Any] = self._map("tokens.bin", self.meta["dtype"])
        self.weight_N: npt.NDArray[np.uint8] | None = (
            self._map("weights.bin", "uint8") if self.kind == "chats" else None
        )

    def _load(self, name: str) -> npt.NDArray[Any]:
        try:
            return np.asarray(np.load(self.folder / name))
        except Exception as error:  # a damaged header raises ValueError, SyntaxError, TokenError, EOFError ...
            raise UserError(f"the file is damaged: {error}", where=self.folder / name) from None

    def _map(self, name: str, dtype: str) -> npt.NDArray[Any]:
        if self.num_tokens == 0:
            return np.zeros(0, dtype)
        return np.memmap(self.folder / name, dtype=dtype, mode="r")

    @property
    def num_tokens(self) -> int:
        return int(self.meta["tokens"])

    @property
    def num_documents(self) -> int:
        return len(self.end_D)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text the tokens were made from."""
        return int(self.bytes_D.sum(dtype=np.int64))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens' file: two runs on the same fingerprint read the same data."""
        return str(self.meta["files"]["tokens.bin"]["sha256"])

    def verify(self) -> None:
        """Hash every file again; raises UserError naming the first that changed."""
        check_hashes(self.folder, self.meta)


class TokenShardWriter:
    """Writes a shard folder: `add` documents, then `close`. Until then only `FOLDER.partial` exists."""

    def __init__(self, folder: Path, *, kind: Kind, vocab_size: int, about: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.kind = kind
        self.dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.about = about
        self._ends: list[int] = []
        self._bytes: list[int] = []
        self._num_tokens = 0
        try:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            self._tokens: IO[bytes] = open(self.partial / "tokens.bin", "wb")
            self._weights: IO[bytes] | None = open(self.partial / "weights.bin", "wb") if kind == "chats" else None
        except OSError as error:
            raise disk_error(error, self.partial) from error

    def add(self, ids: Sequence[int], num_bytes: int, weights: Sequence[int] | None = None) -> None:
        """Append one document of at least one token."""
        try:
            self._tokens.write(np.asarray(ids, dtype=self.dtype).tobytes())
            if self._weights is not None:
                assert weights is not None and len(weights) == len(ids)
                self._weights.write(np.asarray(weights, dtype=np.uint8).tobytes())
        except OSError as error:
            raise disk_error(error, self.partial) from error
        self._num_tokens += len(ids)
        self._ends.append(self._num_tokens)
        self._bytes.append(num_bytes)

    def close(self) -> TokenShards:
        """Finish the files, then give the folder its name; an older folder of that name is replaced."""
        try:
            for stream in (self._tokens, self._weights):
                if stream is not None:
                    stream.close()
            np.save(self.partial / "ends.npy", np.asarray(self._ends, dtype=np.int64))
            np.save(self.partial / "bytes.npy", np.asarray(self._bytes, dtype=np.int32))
            names = ["tokens.bin", "ends.npy", "bytes.npy"] + (["weights.bin"] if self._weights is not None else [])
            files = {
                name: {"bytes": (self.partial / name).stat().st_size, "sha256": sha256_file(self.partial / name)}
                for name in names
            }
        except OSError as error:
            raise disk_error(error, self.partial) from error
        write_json(
            self.partial / META,
            {
                "format": FORMAT,
                "kind": self.kind,
                "dtype": self.dtype.name,
                "tokens": self._num_tokens,
                "documents": len(self._ends),
                "text_bytes": sum(self._bytes),
                **self.about,
                "files": files,
            },
        )
        publish(self.partial, self.folder)
        return TokenShards(self.folder)
