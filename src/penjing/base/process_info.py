"""What the system knows about this process, and what the processes of one launch tell each other."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SAID_SECONDS = 3600  # after which nobody waits for what a launch had to say


def _age_now() -> float:
    try:
        # Field 22 of stat: start, in clock ticks after boot; the name in field 2 may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


# The system tells the age in hundredths of a second: asked once, and counted on by a finer clock.
_BORN = time.perf_counter() - _age_now()


def process_age_seconds() -> float:
    """Seconds since this process was started, imports included; without /proc since this module was imported."""
    return time.perf_counter() - _BORN


def peak_resident_bytes() -> int:
    """The most memory this process has held since it became this program.

    From Linux's own mark, which belongs to the program image: `getrusage` begins with what the parent held, so a small
    program started by a large one seems as large.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not everywhere

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def first_of_launch(say: Callable[[], None], seconds: float = 5.0) -> None:
    """Call `say` in one process of those that torchrun started together here; in the others wait until it was said.

    The first process to end has all others ended: whichever comes first speaks, and the rest must not cut it short.
    Under other launchers, which set RANK alone, the first rank speaks.
    """
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if launch is None:
        if os.environ.get("RANK", "0") == "0":
            say()
        return
    # One agent starts all of a machine's ranks, again after each failure that it is told to bear.
    parts = (launch, *(os.environ.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")), os.getppid())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"penjing-{name}.said"
    with suppress(OSError):
        if path.stat().st_mtime < time.time() - process_age_seconds() - 1:
            path.unlink()  # of an earlier launch with the same numbers
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with suppress(OSError):
                if path.stat().st_size:
                    return
            time.sleep(0.05)
        return
    except OSError:
        say()
        return
    say()
    with suppress(OSError):
        path.write_text("said")
        for old in path.parent.glob("penjing-*.said"):  # of launches that are long over
            if old.stat().st_mtime < time.time() - _SAID_SECONDS:
                old.unlink()
