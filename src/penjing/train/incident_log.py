"""incidents.jsonl: bad steps, spikes, smaller passes, what the disk refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from penjing.base.files import DiskError
from penjing.track.jsonl import JsonLines


class IncidentLog:
    """Writes lines as they come, on rank 0; the file is there from the first one on.

    What is to be noted may be that the disk refuses: lines wait until the file can be written.
    """

    def __init__(self, file: Path, *, rank: int, resume_step: int) -> None:
        self.file, self.rank, self.resume_step = file, rank, resume_step
        self._lines: JsonLines | None = None
        self._waiting: list[dict[str, Any]] = []

    def record(self, incident: dict[str, Any]) -> None:
        """incident: its `step`, `kind` and whatever belongs to it."""
        if self.rank != 0:
            return
        self._waiting.append(incident)
        try:
            self._lines = self._lines or JsonLines(self.file, resume_step=self.resume_step)
        except (OSError, DiskError) as error:
            warnings.warn(f"{self.file} cannot be written, its lines wait: {error}", stacklevel=2)
            return
        while self._waiting:
            first = self._waiting.pop(0)
            self._lines.log(first["step"], {name: value for name, value in first.items() if name != "step"})
