"""Right answers: how sure a count is, and what training changed, by kind of question and language."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution
BEFORE, AFTER = "before", "after"


def wilson(right: int, asked: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a fraction (Wilson 1927); with nothing asked it is the whole of [0, 1].

    centre = (p + z^2/2n) / (1 + z^2/n), half width = z/(1 + z^2/n) * sqrt(p(1-p)/n + z^2/4n^2)
    """
    if asked <= 0:
        return 0.0, 1.0
    fraction = right / asked
    shrink = 1 + z * z / asked
    centre = (fraction + z * z / (2 * asked)) / shrink
    half = z / shrink * math.sqrt(fraction * (1 - fraction) / asked + z * z / (4 * asked * asked))
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True, kw_only=True)
class Score:
    """`right` of `asked` questions, with the fraction that guessing would get. False where nothing was asked."""

    asked: int
    right: int
    chance: float | None = None

    def __bool__(self) -> bool:
        return self.asked > 0

    @property
    def fraction(self) -> float:
        return self.right / max(1, self.asked)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the fraction."""
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


Scores = Mapping[tuple[str, str, str], Score]  # by BEFORE or AFTER, kind and language


@dataclass(frozen=True, kw_only=True)
class AccuracyLine:
    """One line of a table. A total has an empty `kind`, an empty `language`, or both."""

    kind: str
    language: str
    before: Score
    after: Score

    @property
    def name(self) -> str:
        """What a line that is a total over kinds or languages is called."""
        return self.kind or self.language or "all"

    @property
    def best(self) -> Score:
        """The latest score there is."""
        return self.after or self.before

    @property
    def is_lost(self) -> bool:
        """Whether the fraction right after training lies below the 95 % interval from before."""
        return self.after.asked > 0 and self.after.fraction < self.before.interval[0]


def pool(scores: Iterable[Score]) -> Score:
    """All together; chance is weighted by the questions asked."""
    scores = [score for score in scores if score]
    asked = sum(score.asked for score in scores)
    chances = [score.chance * score.asked for score in scores if score.chance is not None]
    chance = sum(chances) / asked if asked and len(chances) == len(scores) else None
    return Score(asked=asked, right=sum(score.right for score in scores), chance=chance)


def _lines(scores: Scores, keys: Iterable[tuple[str, str]]) -> list[AccuracyLine]:
    """A line for each (kind, language) of which something was asked; empty means all."""
    found = []
    for kind, language in keys:
        before, after = (
            pool(score for key, score in scores.items() if key == (when, kind or key[1], language or key[2]))
            for when in (BEFORE, AFTER)
        )
        if before or after:
            found.append(AccuracyLine(kind=kind, language=language, before=before, after=after))
    return found


def accuracy_lines(scores: Scores) -> list[AccuracyLine]:
    """Lines per kind and language in order of appearance, then a total per language, then one over all."""
    kinds = dict.fromkeys(kind for _, kind, _ in scores if kind)
    languages = sorted({language for _, _, language in scores})
    keys = [(kind, language) for kind in kinds for language in languages if language]
    keys += [("", language) for language in languages if language] if len(languages) > 1 else []
    return _lines(scores, [*keys, ("", "")])


def change_lines(scores: Scores) -> list[AccuracyLine]:
    """A line for each kind, where there are several languages for each of them, and one for all."""
    kinds = dict.fromkeys(kind for _, kind, _ in scores if kind)
    languages = dict.fromkeys(language for _, _, language in scores)
    keys = [(kind, "") for kind in kinds]
    keys += [("", language) for language in languages] if len(languages) > 1 else []
    return _lines(scores, [*keys, ("", "")])


def scores_of(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> Scores:
    """What two times of asking the same questions came to, from rows as `eval.questions.table` makes them."""
    return {
        (when, row["kind"], row["language"]): Score(asked=row["asked"], right=row["right"], chance=row["chance"])
        for when, rows in ((BEFORE, before), (AFTER, after))
        for row in rows
    }
