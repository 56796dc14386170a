"""Age, peak memory and thread times of this process, and coordination of the processes of one launch."""

import hashlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

_MARKER_SECONDS = 3600  # age at which a launch's marker file is deleted


def _age_now() -> float:
    try:
        # Field 22 of stat: start, in clock ticks after boot; the name in field 2 may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


# The system gives the age in hundredths of a second: read once, then counted by a finer clock.
_START_TIME = time.perf_counter() - _age_now()


def own_command() -> str:
    """`penjing`, or its path where a shell does not find that: `make quickstart` activates no environment."""
    path = Path(sys.executable).with_name("penjing")
    return "penjing" if shutil.which("penjing") or not path.exists() else shlex.quote(os.path.relpath(path))


def process_age_seconds() -> float:
    """Seconds since the process started, imports included; without /proc, since this module was imported."""
    return time.perf_counter() - _START_TIME


def peak_resident_bytes() -> int:
    """The peak resident memory (RSS) of this process since it became this program.

    On Linux it is VmHWM, which belongs to the program image. `getrusage` starts with the parent's value, so a small
    program started by a large one would seem as large.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not everywhere

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The resident memory (RSS) of this process now; without /proc the peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak_resident_bytes()


def thread_seconds(since: Mapping[str, tuple[float, float]] | None = None) -> dict[str, tuple[float, float]]:
    """For each thread of this process: seconds it ran on a core, and seconds it was runnable but waited for one. since:
    an earlier result, which is subtracted. Empty except on Linux."""
    seconds = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that has just ended; another file format
            running, waited, _ = file.read_text().split()
            name = file.parent.name
            earlier = (since or {}).get(name, (0.0, 0.0))
            seconds[name] = (int(running) / 1e9 - earlier[0], int(waited) / 1e9 - earlier[1])
    return seconds


def say(line: str) -> None:
    """Print a line of this program on stderr at once, if it can be written."""
    with suppress(OSError):
        print(f"penjing: {line}", file=sys.stderr, flush=True)


def run_once_per_launch(action: Callable[[], None], seconds: float = 5.0) -> None:
    """Run `action` in one of the processes that torchrun started here; the others wait until it is done.

    torchrun ends all processes when the first one ends. So the first to arrive runs the action, and the others must not
    end before it is done. Other launchers set RANK only; there rank 0 runs it.
    """
    launch = os.environ.get("TORCHELASTIC_RUN_ID")
    if launch is None:
        if os.environ.get("RANK", "0") == "0":
            action()
        return
    # One agent starts all ranks of a machine, and restarts them after a failure.
    key = (launch, *(os.environ.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")), os.getppid())
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    marker = Path(tempfile.gettempdir()) / f"penjing-{name}.said"
    with suppress(OSError):
        if marker.stat().st_mtime < time.time() - process_age_seconds() - 1:
            marker.unlink()  # of an earlier launch with the same numbers
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(OSError):
                if marker.stat().st_size:
                    return
            time.sleep(0.05)
        return
    except OSError:
        pass
    action()
    with suppress(OSError):
        marker.write_text("said")
        for old_marker in marker.parent.glob("penjing-*.said"):  # of launches that are long over
            if old_marker.stat().st_mtime < time.time() - _MARKER_SECONDS:
                old_marker.unlink()
