"""Right answers as a table: each kind and language before and after training, beside what guessing would get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penjing.base.interval import wilson
from penjing.report.load_run import AccuracyRow

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, kw_only=True)
class Score:
    """`right` of `asked` questions, with the fraction that guessing would get."""

    asked: int
    right: int
    chance: float | None

    @property
    def fraction(self) -> float:
        return self.right / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.asked)

    @property
    def verdict(self) -> str:
        """What the 95 % interval says about guessing."""
        if self.chance is None:
            return ""
        low, high = self.interval
        if low > self.chance:
            return "above guessing"
        return "below guessing" if high < self.chance else "like guessing"


@dataclass(frozen=True, kw_only=True)
class AccuracyLine:
    """One line of the table. A total has an empty `kind`; the total over all has an empty `language` too."""

    kind: str
    language: str
    before: Score | None
    after: Score | None

    @property
    def best(self) -> Score | None:
        """The latest score there is."""
        return self.after or self.before

    @property
    def chance(self) -> float | None:
        return self.best.chance if self.best else None

    @property
    def is_lost(self) -> bool:
        """Whether the fraction right after training lies below the 95 % interval from before."""
        if self.before is None or self.after is None:
            return False
        return self.after.fraction < self.before.interval[0]


def pool(rows: Iterable[AccuracyRow]) -> Score | None:
    """All rows together; chance is weighted by the questions asked. None when nothing was asked."""
    asked_rows = [row for row in rows if row.asked > 0]
    asked = sum(row.asked for row in asked_rows)
    if not asked:
        return None
    chances = [row.chance * row.asked for row in asked_rows if row.chance is not None]
    chance = sum(chances) / asked if len(chances) == len(asked_rows) else None
    return Score(asked=asked, right=sum(row.right for row in asked_rows), chance=chance)


def _line(rows: Sequence[AccuracyRow], kind: str, language: str) -> AccuracyLine | None:
    """The line for one kind and language, where empty means all; None when nothing was asked."""
    chosen = [row for row in rows if row.kind == (kind or row.kind) and row.language == (language or row.language)]
    before = pool(row for row in chosen if row.stage == BEFORE)
    after = pool(row for row in chosen if row.stage == AFTER)
    return AccuracyLine(kind=kind, language=language, before=before, after=after) if before or after else None


def lost_kinds(rows: Sequence[AccuracyRow]) -> list[AccuracyLine]:
    """The kinds of questions that training lost, all languages together."""
    lines = [_line(rows, kind, "") for kind in dict.fromkeys(row.kind for row in rows if row.kind)]
    return [line for line in lines if line is not None and line.is_lost]


def accuracy_lines(rows: Sequence[AccuracyRow]) -> list[AccuracyLine]:
    """Lines per kind and language in order of appearance, then a total per language, then one over all."""
    rows = list({(row.stage, row.kind, row.language): row for row in rows if row.stage in (BEFORE, AFTER)}.values())
    languages = list(dict.fromkeys(sorted(row.language for row in rows)))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind))
    keys = [(kind, language) for kind in kinds for language in languages if language]
    keys += [("", language) for language in languages if language] if len(languages) > 1 else []
    keys += [("", "")]
    return [line for line in (_line(rows, kind, language) for kind, language in keys) if line is not None]
