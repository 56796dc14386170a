"""One writer per folder: a file lock that names its owner and ends with the owner's process."""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penjing.base.errors import UserError
from penjing.base.files import disk_errors, make_folder, remove_unfinished

LOCK = ".lock"
LOOK_SECONDS = 0.05  # longer than `is_locked` holds the lock; others may look at any time


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder`. The operating system releases the lock when this process dies. Raises UserError naming the owner
    if another process holds the lock. Removes what killed processes left half written an hour ago or more. On file
    systems without locks (some network ones) nothing is locked."""
    path = folder / LOCK
    make_folder(folder)
    with disk_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOOK_SECONDS)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another process is working in this folder"
            hint = "Wait for it, stop it, or choose another out=."
            raise UserError(what, where=folder, got=owner(folder) or "an unknown process", next_step=hint) from None
        except OSError:  # no locks on this file system
            yield
            return
        owner_info = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # on a full disk the lock holds without its owner's name
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(owner_info).encode() + b"\n", 0)
        remove_unfinished(folder)
        yield
    finally:
        os.close(handle)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Where to write what is renamed to `path` once it is whole: a place in PATH.partial, which is locked, and removed
    at the end. Raises UserError as `locked` does, and if the disk refuses."""
    folder = path.with_name(path.name + ".partial")
    with disk_errors(path), locked(folder):
        try:
            place = folder / folder.name
            shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
            yield place
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def owner(folder: Path) -> str | None:
    """The present or last owner of the lock, as text; None if it was never locked."""
    try:
        owner_info = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return f"process {owner_info['pid']} on {owner_info['host']} since {owner_info['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_locked(folder: Path) -> bool:
    """Whether a running process holds the lock of `folder`."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
