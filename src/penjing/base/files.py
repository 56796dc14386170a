"""Files that are whole or not there: atomic writes, hashes, and one error line when the disk says no."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
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


def disk_error(error: OSError, path: Path) -> UserError:
    """Turn an operating-system error on `path` into one clear line."""
    reason = _DISK_ERRORS.get(error.errno or 0, error.strerror or str(error))
    return UserError(f"cannot write: {reason}", where=path, next_step="Nothing that was there before is lost.")


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable (a file's own fsync does not cover its name)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Open a temporary sibling of `path`; on success fsync it and rename it over `path`, on failure remove it.

    A reader, or a run killed at any instant, sees the old file or the new one and never a half.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, **options) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # where the folder could not be made there is nothing to remove either
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_write(path) as stream:
        stream.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON, atomically. NaN and infinity are refused: other readers reject them."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file of ours; a missing or broken one is a `UserError` that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", where=path) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"not valid JSON: {error}", where=path) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=path) from None


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
