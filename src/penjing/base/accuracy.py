"""Accuracy on questions: its confidence interval, and its change by training, per kind of question and language."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penjing.base.untrusted import Fields, Json

Z_95 = 1.959964  # two-sided 95 % quantile of the normal distribution
BEFORE, AFTER = "before", "after"


def wilson(correct: float, total: int) -> tuple[float, float]:
    """The 95 % score interval of a fraction (Wilson 1927); [0, 1] without questions. centre = (p + z^2/2n) / (1 +
    z^2/n), half width = z/(1 + z^2/n) * sqrt(p(1-p)/n + z^2/4n^2)."""
    if total <= 0:
        return 0.0, 1.0
    fraction, z = correct / total, Z_95
    shrink = 1 + z * z / total
    centre = (fraction + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(fraction * (1 - fraction) / total + z * z / (4 * total * total))
    return max(centre - half, 0.0), min(centre + half, 1.0)


@dataclass(frozen=True, kw_only=True)
class Score:
    """`correct` of `total` questions; chance: the accuracy of guessing. False if no question was asked."""

    total: int
    correct: float
    chance: float | None = None

    def __bool__(self) -> bool:
        return self.total > 0

    @property
    def fraction(self) -> float:
        return self.correct / max(1, self.total)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the fraction."""
        return wilson(self.correct, self.total)

    @property
    def verdict(self) -> str:
        """Whether the 95 % interval lies above, below or around chance."""
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
        """Its kind; of a total, the language or `all`."""
        return self.kind or self.language or "all"

    @property
    def best(self) -> Score:
        """The latest score: after training if there is one."""
        return self.after or self.before

    @property
    def is_regression(self) -> bool:
        """Whether the fraction right after training lies below the 95 % interval from before."""
        return self.after.total > 0 and self.after.fraction < self.before.interval[0]

    @property
    def verdict(self) -> str:
        """How the latest score compares with guessing, and whether training lost what there was."""
        return "; ".join(filter(None, (self.best.verdict, "lost" if self.is_regression else "")))


def pool(scores: Iterable[Score]) -> Score:
    """The sum of the scores; chance is averaged, weighted by the number of questions."""
    scores = [score for score in scores if score]
    total = sum(score.total for score in scores)
    weighted = [score.chance * score.total for score in scores if score.chance is not None]
    chance = sum(weighted) / total if total and len(weighted) == len(scores) else None
    return Score(total=total, correct=sum(score.correct for score in scores), chance=chance)


def _lines(scores: Scores, keys: Iterable[tuple[str, str]]) -> list[AccuracyLine]:
    """A line for each (kind, language) with questions; empty means all."""
    lines = []
    for kind, language in keys:
        before, after = (
            pool(score for key, score in scores.items() if key == (when, kind or key[1], language or key[2]))
            for when in (BEFORE, AFTER)
        )
        if before or after:
            lines.append(AccuracyLine(kind=kind, language=language, before=before, after=after))
    return lines


def accuracy_lines(scores: Scores) -> list[AccuracyLine]:
    """Lines per kind and language in order of appearance, then a total per language, then one over all."""
    kinds = dict.fromkeys(kind for _, kind, _ in scores if kind)
    languages = sorted({language for _, _, language in scores})
    keys = [(kind, language) for kind in kinds for language in languages if language]
    keys += [("", language) for language in languages if language] if len(languages) > 1 else []
    return _lines(scores, [*keys, ("", "")])


def change_lines(scores: Scores) -> list[AccuracyLine]:
    """A line per kind, one per language if there are several, and one total."""
    kinds = dict.fromkeys(kind for _, kind, _ in scores if kind)
    languages = dict.fromkeys(language for _, _, language in scores)
    keys = [(kind, "") for kind in kinds]
    keys += [("", language) for language in languages] if len(languages) > 1 else []
    return _lines(scores, [*keys, ("", "")])


def scores_from_rows(before: Iterable[Json], after: Iterable[Json]) -> Scores:
    """The scores of two evaluations on the same questions, from rows of `eval.scorer.score_rows`. Of rows that somebody
    else may have written 0 <= right <= asked, and a chance level that is no fraction is unknown."""
    scores = {}
    for when, row in [*((BEFORE, Fields(row)) for row in before), *((AFTER, Fields(row)) for row in after)]:
        asked = max(round(row.number("asked") or 0), 0)
        right = min(max(round(row.number("right") or 0), 0), asked)
        chance = row.number("chance")
        is_fraction = chance is not None and 0 <= chance <= 1
        key = (when, row.text("kind"), row.text("language"))
        scores[key] = Score(total=asked, correct=right, chance=chance if is_fraction else None)
    return scores
