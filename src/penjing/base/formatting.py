"""Numbers, sizes and durations as text. GiB is 2^30 bytes, GB is 10^9."""

from collections.abc import Sequence


def count(number: float) -> str:
    """1_234_567 -> '1.23M', 646.3421 -> '646.3'."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,600 rounds to 1,000 k, which is 1M.
        if abs(number) >= 0.9995 * size and abs(number) >= 1000:
            return f"{number / size:.3g}{suffix}" if abs(number) < 999.5 * size else f"{number / size:.0f}{suffix}"
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def listing(names: Sequence[str], max_names: int = 5) -> str:
    """The first names and the number of the others: 'a, b and 3 more'."""
    suffix = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + suffix


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
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600:02d} h"
