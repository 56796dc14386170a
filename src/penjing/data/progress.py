"""How much of its files a pass over the records has read."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from penjing.base import formatting as units
from penjing.data.clean.rule import place_of, texts_of

Show = Callable[[float, int], None]  # gets the fraction of the files' bytes, 0 if unknown, and the bytes of text so far
SHOWN_EVERY, FIRST_LINE, LINE_EVERY = 0.2, 10.0, 30.0  # seconds
COMPRESSED = (".gz", ".zst", ".parquet", ".arrow")


def watch(records: Iterable[Any], files: Sequence[Path], show: Show) -> Iterator[Any]:
    """The records; calls `show` a few times a second. Inside a file the fraction is an estimate."""
    sizes = {str(path): path.stat().st_size for path in files if path.is_file()}
    before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))  # bytes of the files before
    total = sum(sizes.values())
    source, ratio, in_file, num_bytes, shown = "", 0.0, 0, 0, time.monotonic()
    for record in records:
        yield record
        name, _ = place_of(record)
        if name != source:  # a file's bytes per byte of text, as in the file before; text packs to about a third
            known = sizes.get(source, 0) / in_file if in_file else 0.0
            ratio = known or (0.35 if name.endswith(COMPRESSED) else 1.0)
            source, in_file = name, 0
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts_of(record))
        num_bytes, in_file = num_bytes + size, in_file + size
        if (now := time.monotonic()) - shown >= SHOWN_EVERY:
            shown = now
            in_source = min(in_file * ratio, 0.99 * sizes.get(source, 0))
            show((before.get(source, 0) + in_source) / max(1, total), num_bytes)


class ProgressLines:
    """Reports a line after ten seconds, and then every half minute, with the time that is left."""

    def __init__(self, report: Callable[[str], None], what: str) -> None:
        self._report, self._what = report, what
        self._began, self._next, self._last = 0.0, FIRST_LINE, 0

    def __call__(self, fraction: float, num_bytes: int) -> None:
        if num_bytes < self._last or not self._began:  # a new pass
            self._began, self._next = time.monotonic(), FIRST_LINE
        self._last = num_bytes
        seconds = time.monotonic() - self._began
        if seconds < self._next:
            return
        self._next = seconds + LINE_EVERY
        left = f", about {units.duration(seconds * (1 / fraction - 1))} left" if fraction else ""
        self._report(f"{self._what}: {units.megabytes(num_bytes)} of text, {fraction:.0%}{left}")
