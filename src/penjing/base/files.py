"""File input and output: atomic writes, hashes, and one error line when the disk refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from penjing.base.errors import UserError

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}
LARGEST_FILE_BYTES = 256 << 20  # limit for files that are read at once, such as JSON
UNFINISHED_SECONDS = 3600  # since the last byte: no process is still writing there


class DiskError(UserError):
    """The disk refused a write. Training continues without the file where it can."""


def disk_error(error: OSError, path: Path) -> DiskError:
    """Turn an operating-system error on `path` into one clear line."""
    reason = _DISK_ERRORS.get(error.errno or 0, error.strerror or str(error))
    return DiskError(f"cannot write: {reason}", where=path, next_step="Nothing that was there before is lost.")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn each OSError raised inside into a `disk_error` on `path`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def make_folder(folder: Path) -> None:
    """Create a folder, or check an existing one, before the work whose result is written there. Raises UserError for a
    file of that name, DiskError for a folder that cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError("a file, not a folder", where=folder, next_step="Choose another folder.") from None
    except OSError as error:
        raise disk_error(error, folder) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise disk_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), folder)


def printable(path: Path) -> str:
    r"""The path as valid UTF-8: bytes that are not UTF-8 become \xNN."""
    return os.fsencode(str(path)).decode("utf-8", "backslashreplace")


def check_free_space(folder: Path, wanted_bytes: int) -> None:
    """Raise DiskError if the disk of `folder` has fewer free bytes; called before anything is written."""
    with disk_errors(folder):
        free = shutil.disk_usage(folder).free
    if free < wanted_bytes:
        what = "cannot write: the disk is full"
        hint = "Nothing that was there before is lost."
        raise DiskError(what, where=folder, got=f"{free:,} bytes free", wanted=f"{wanted_bytes:,}", next_step=hint)


class NewFile:
    """A new file, written, synced and hashed in one pass. It never follows a symbolic link. The only system calls are
    `os.open`, `os.write`, `os.fsync` and `os.close`; tests make each of them fail."""

    _CHUNK_BYTES = 1 << 24  # maximum of one system call; hashing and writing release the GIL

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._hash, self.num_bytes = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            chunk = view[: self._CHUNK_BYTES]
            written = os.write(self._handle, chunk)
            self._hash.update(chunk[:written])
            self.num_bytes += written
            view = view[written:]

    def facts(self) -> dict[str, Any]:
        """Size and hash of the written bytes, for a manifest."""
        return {"bytes": self.num_bytes, "sha256": self._hash.hexdigest()}

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is None:
                os.fsync(self._handle)
        finally:
            os.close(self._handle)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable (a file's own fsync does not cover its name)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary sibling of `path`; on success fsync it and rename it over `path`, on failure remove it. A reader
    sees the old file or the new one, never a partial one, even if the process is killed."""
    path = Path(path)
    # Not the process id: threads, and containers that share a home directory, write at the same time under one id.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # if the folder could not be created, there is nothing to remove
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what `atomic_write` left in `folder`, and in the folders in it, when it was killed an hour ago or more."""
    name = f".*.{'[0-9a-f]' * 8}.tmp"
    for left in [*folder.glob(name), *folder.glob(f"*/{name}")]:
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > UNFINISHED_SECONDS:
                left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_write(path) as stream:
        stream.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON, atomically. NaN and infinity are refused: other readers reject them."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False)
    if not text.isascii() and text != text.encode("utf-8", "ignore").decode("utf-8"):  # a file name that is not UTF-8
        text = json.dumps(value, indent=2, allow_nan=False)
    write_text(path, text + "\n")


@contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open an ordinary file for reading. A pipe, a device or a folder raises UserError at once."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as stream:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
            raise UserError(
                f"{names.get(stat.S_IFMT(mode), 'a device')}, not a file", where=path, wanted="an ordinary file"
            )
        yield stream


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing, broken, too large or too deeply nested one is a `UserError` that names it."""
    return read_parsed(path, "JSON", json.loads)


def read_parsed(path: Path, kind: str, parse: Callable[[str], Any], max_bytes: int = LARGEST_FILE_BYTES) -> Any:
    """`parse` applied to a file's text, with the errors of `read_json`. kind: the format named in the error."""
    with read_errors(path), open_regular(path) as stream:
        raw = stream.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise UserError("too large", where=path, wanted=f"at most {max_bytes:,} bytes")
    try:
        return parse(raw.decode("utf-8-sig"))  # Windows editors put a BOM there
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and numbers of 5,000 digits among them
        raise UserError(f"not valid {kind}: {error}", where=path) from None


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn each OSError raised inside into a UserError: `path` cannot be read, and why."""
    try:
        yield
    except FileNotFoundError:
        raise UserError("no such file", where=path) from None
    except IsADirectoryError:
        raise UserError("a folder, not a file", where=path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=path) from None


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
