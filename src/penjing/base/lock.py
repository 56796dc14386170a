"""One writer per folder: a lock that ends with its owner, however it ends, and says who that is."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penjing.base.errors import UserError
from penjing.base.files import disk_errors

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` alone. The system lets go of the lock when this process dies: a dead owner's never blocks.

    Raises UserError naming the owner if another process holds it. Where the file system knows no locks (some network
    ones) nothing is held.
    """
    path = folder / LOCK
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another process is at work in this folder",
                where=folder,
                got=owner(folder) or "an owner that did not say its name",
                next_step="Wait for it, stop it, or choose another out=.",
            ) from None
        except OSError:  # no locks on this file system
            yield
            return
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with suppress(OSError):  # a full disk: the lock holds without a name on it
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(about).encode() + b"\n", 0)
        yield
    finally:
        os.close(handle)


def owner(folder: Path) -> str | None:
    """Who holds `folder`, or held it last, in words; None where nobody ever did."""
    try:
        about = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(folder: Path) -> bool:
    """Whether a living process holds `folder` now."""
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
