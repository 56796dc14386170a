"""Figures as JSON lines beside the weights: always on, needs nothing, and a resumed run continues the same curve."""

from __future__ import annotations

import errno
import json
import math
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penjing.base.files import DiskError, write_text

MOST_WAITING = 10_000  # lines kept in memory while the disk refuses them


class JsonLines:
    """Appends `{"step": ..., figures}`; lines after `resume_step` (work that is done again) are removed before the
    first one is written. The file is there from then on."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._broken = False  # whether the last line on the disk may be half of one
        self._cut_at: float = resume_step  # lines of later steps are yet to be removed from the disk

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps; what a full disk refuses is made up for before the next line is written."""
        earlier = (line for line in self._waiting if json.loads(line)["step"] <= step)
        self._waiting = deque(earlier, maxlen=MOST_WAITING)
        self._cut_at = min(self._cut_at, step)
        self._try_to_write()

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        """Lines that a full disk refuses wait, and are written with the next one that finds room."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        self._waiting.append(json.dumps({"step": step, **finite}, ensure_ascii=False).encode() + b"\n")
        self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except (OSError, DiskError) as error:
            if not self._broken:
                warnings.warn(f"{self.path} cannot be written, its lines wait: {error}", stacklevel=3)
            self._broken = True

    def _write(self) -> None:
        if self._cut_at < math.inf:
            lines = [line for line in read_lines(self.path) if line["step"] <= self._cut_at]
            write_text(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            self._cut_at, self._broken = math.inf, False
        with open(self.path, "ab", buffering=0) as stream:
            if self._broken:  # a line of its own for what was cut short; readers leave it out
                stream.write(b"\n")
                self._broken = False
            while self._waiting:
                line = self._waiting[0]
                if stream.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "No space left on device")
                self._waiting.popleft()

    def close(self) -> None:
        if self._waiting or self._cut_at < math.inf:
            with suppress(OSError, DiskError):
                self._write()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a last line cut short by a kill is left out. None where there is no file."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:  # not JSON, or not UTF-8
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):  # the end of a cut line may be a number
            lines.append(line)
    return lines
