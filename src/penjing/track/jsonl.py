"""Metrics as JSON lines in the run's folder. Always on and without dependencies; a resumed run continues the file."""

import errno
import json
import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import write_text
from penjing.base.untrusted import read_lines
from penjing.track.base import Tracker

MAX_PENDING = 10_000  # lines kept in memory while the disk refuses them


class JsonLines(Tracker):
    """Appends lines of `{"step": ..., metrics}`. Before the first line is written, lines of steps after `resume_step`,
    which will be repeated, are removed; this creates the file."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)
        self._partial_line = False  # whether the last line on the disk may be incomplete
        self._truncate_after: float = resume_step  # lines of later steps are still to be removed from the disk

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps; if the disk is full, before the next line is written."""
        earlier = (line for line in self._pending if json.loads(line)["step"] <= step)
        self._pending = deque(earlier, maxlen=MAX_PENDING)
        self._truncate_after = min(self._truncate_after, step)
        self._try_to_write()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line. If the disk is full it stays in memory and is written with a later one."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        self._pending.append(json.dumps({"step": step, **finite}, ensure_ascii=False).encode() + b"\n")
        self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except (OSError, UserError) as error:
            if not self._partial_line:
                warnings.warn(f"{self.path} cannot be written, its lines wait: {error}", stacklevel=3)
            self._partial_line = True

    def _write(self) -> None:
        if self._truncate_after < math.inf:
            lines = [line for line in read_lines(self.path) if line["step"] <= self._truncate_after]
            write_text(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            self._truncate_after, self._partial_line = math.inf, False
        with open(self.path, "ab", buffering=0) as stream:
            if self._partial_line:  # end the incomplete line, which readers skip
                stream.write(b"\n")
                self._partial_line = False
            while self._pending:
                line = self._pending[0]
                if stream.write(line) != len(line):
                    raise OSError(errno.ENOSPC, "No space left on device")
                self._pending.popleft()

    @property
    def waits(self) -> bool:
        """Whether the disk has refused lines."""
        return bool(self._pending)

    def end(self) -> None:
        if self._pending or self._truncate_after < math.inf:
            self._try_to_write()


class RunFiles(Tracker):
    """A run's metrics, samples and incidents, each a file. A rollback leaves its samples and incidents."""

    def __init__(self, metrics: Path, samples: Path, incidents: Path, *, resume_step: int) -> None:
        paths = (metrics, samples, incidents)
        self._metrics, self._samples, self._incidents = (JsonLines(path, resume_step=resume_step) for path in paths)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._metrics.log(step, metrics)

    def rewind(self, step: int) -> None:
        self._metrics.rewind(step)

    def end(self) -> None:
        self._metrics.end()
        for lines in (self._samples, self._incidents):
            if lines.waits:  # else it would make an empty file
                lines.end()

    def sample(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._samples.rewind(step - 1)
        for one in samples:
            self._samples.log(step, one)

    def incident(self, incident: Mapping[str, Any]) -> None:
        self._incidents.log(incident["step"], incident)
