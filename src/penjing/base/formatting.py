"""Figures as people read them. GiB is 2^30 bytes, GB is 10^9; the two are never mixed."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: float) -> str:
    """1_234_567 -> '1.23M'."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,600 rounds to 1,000 k, which is 1M.
        if abs(number) >= 0.9995 * size and abs(number) >= 1000:
            return f"{number / size:.3g}{suffix}" if abs(number) < 999.5 * size else f"{number / size:.0f}{suffix}"
    return f"{number:g}" if isinstance(number, float) else str(number)


def listing(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are: 'a, b and 3 more'."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def gibibytes(num_bytes: float) -> str:
    """Bytes as GiB, or MiB below one tenth of a GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def megabytes(num_bytes: float) -> str:
    """Bytes as MB (10^6), for file sizes."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    """Seconds as '45 s', '3 min 20 s', '2 h 05 min' or '3 d 04 h'."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
