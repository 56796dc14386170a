"""Figures as JSON lines beside the weights: always on, needs nothing, and a resumed run continues the same curve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penjing.base.files import write_text


class JsonLines:
    """Appends `{"step": ..., figures}`; lines after `resume_step` (work that is done again) are removed first."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if line["step"] <= resume_step] if path.exists() else []
        write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        self._stream = open(path, "a", encoding="utf-8")

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }
        self._stream.write(json.dumps({"step": step, **finite}, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a last line cut short by a kill is left out."""
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(text))
        except ValueError:  # not JSON, or not UTF-8
            continue
    return lines
