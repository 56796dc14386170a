"""JSON that somebody else may have written: every part may be missing, partially written or of another type."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penjing.base.errors import UserError
from penjing.base.files import open_regular, read_json

MAX_NUMBER = 1e200  # beyond this the difference of two numbers may overflow; no run measures such values

# Control characters, terminal escapes and direction overrides: they could hide or reorder the text next to them.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff]")

Json = Mapping[str, Any]


def number(value: object) -> float | None:
    """A finite number of reasonable size, else None (booleans and strings are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) and abs(real) <= MAX_NUMBER else None


def text(value: object) -> str:
    """Printable, encodable text: no lone surrogates, control characters or direction overrides."""
    if value is None or isinstance(value, Mapping | list):
        return ""
    plain = str(value).replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", plain)


@dataclass(frozen=True)
class Fields:
    """A JSON object from a file: each field is read as its expected type, or as empty."""

    raw: Json = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.raw)

    def number(self, name: str) -> float | None:
        return number(self.raw.get(name))

    def text(self, name: str) -> str:
        return text(self.raw.get(name))

    def fields(self, name: str) -> Fields:
        value = self.raw.get(name)
        return Fields(value) if isinstance(value, Mapping) else Fields()

    def items(self, name: str) -> tuple[Fields, ...]:
        """The JSON objects in a JSON list."""
        value = self.raw.get(name)
        return tuple(Fields(entry) for entry in value if isinstance(entry, Mapping)) if isinstance(value, list) else ()

    def texts(self, name: str) -> tuple[str, ...]:
        """The entries of a JSON list as texts."""
        value = self.raw.get(name)
        return tuple(map(text, value)) if isinstance(value, list) else ()


def read_fields(path: Path) -> Fields:
    """The JSON object in a file; empty if there is none. Raises UserError for anything else."""
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, Mapping):
        raise UserError("no JSON object", where=path)
    return Fields(value)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of metrics, samples or incidents, without one cut short by a kill. Empty if there is
    no file."""
    if not path.exists():
        return []
    with open_regular(path) as stream:
        return parse_lines(stream)


def parse_lines(written: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects with a `step` among the lines; others were cut short."""
    lines: list[dict[str, Any]] = []
    for one in written:
        try:
            line = json.loads(one)
        except (ValueError, RecursionError):  # not JSON, or not UTF-8
            continue
        step = line.get("step") if isinstance(line, dict) else None  # the rest of a cut line may be a number
        if isinstance(step, int) and number(step) is not None:
            lines.append(line)
    return lines
