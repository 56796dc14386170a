"""What training changed: the same questions before its first step and after its last, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penjing.base.interval import wilson

ALL = "all"


@dataclass(frozen=True, slots=True)
class Change:
    """Right answers before and after to one kind of question, to all of one language, or to all."""

    name: str  # the kind, the language, or `all`
    asked: int
    before: int
    after: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the fraction that was right before."""
        return wilson(self.before, self.asked)

    @property
    def is_lost(self) -> bool:
        """Whether the fraction that is right now lies below that interval."""
        return self.after / self.asked < self.interval[0]

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.after} of {self.asked}"


def changes(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[Change]:
    """A line for each kind, where there are several languages for each of them, and one for all.

    before, after: rows of `questions.table` for the same questions.
    """
    before, after = list(before), list(after)
    kinds = list(dict.fromkeys(row["kind"] for row in before))
    languages = list(dict.fromkeys(row["language"] for row in before))
    found = [_change(kind, before, after, "kind", kind) for kind in kinds]
    if len(languages) > 1:
        found += [_change(language, before, after, "language", language) for language in languages]
    return [*found, _change(ALL, before, after)] if found else []


def _change(name: str, before: Sequence[Any], after: Sequence[Any], field: str = "", value: str = "") -> Change:
    mine = [[row for row in rows if not field or row[field] == value] for rows in (before, after)]
    right = [sum(row["right"] for row in rows) for rows in mine]
    return Change(name, sum(row["asked"] for row in mine[0]), *right)
