"""Counts of right answers: intervals against figures worked out by hand, totals, chance."""

from __future__ import annotations

import pytest

from penjing.base.accuracy import Score, Scores, accuracy_lines, change_lines, pool, scores_from_rows, wilson


def row(kind: str, right: int, language: str = "en", asked: int = 20) -> dict[str, object]:
    return {"kind": kind, "language": language, "asked": asked, "right": right, "chance": 0.0}


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        # z^2 = 3.841459. 0 of 10: high = z^2/(10 + z^2) = 3.841459/13.841459; 10 of 10 is its mirror image.
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        # 5 of 10: centre 1/2, half width z*sqrt(0.025 + z^2/400)/(1 + z^2/10) = 1.959964*0.186021/1.384146 = 0.263408
        (5, 10, 0.236593, 0.763407),
        # 1 of 1: low = 1/(1 + z^2) = 1/4.841459
        (1, 1, 0.206549, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(right: int, asked: int, low: float, high: float) -> None:
    assert wilson(right, asked) == pytest.approx((low, high), abs=1e-5)


def test_verdict_needs_the_whole_interval() -> None:
    assert Score(total=100, correct=50, chance=0.25).verdict == "above guessing"
    assert Score(total=100, correct=27, chance=0.25).verdict == "like guessing"
    assert Score(total=100, correct=5, chance=0.25).verdict == "below guessing"
    assert Score(total=100, correct=5, chance=None).verdict == ""


def test_pool_weights_chance_by_questions() -> None:
    empty = Score(correct=0, total=0, chance=1.0)
    score = pool([Score(correct=9, total=10, chance=0.5), Score(correct=3, total=30, chance=0.1), empty])
    assert (score.correct, score.total) == (12, 40)
    assert score.chance == pytest.approx((5 + 3) / 40)
    assert not pool([empty])
    assert pool([Score(correct=1, total=10, chance=0.25), Score(correct=1, total=10)]).chance is None


def test_lines_and_totals() -> None:
    scores: Scores = {
        (when, kind, language): Score(correct=hits, total=10)
        for when, hits in (("before", 2), ("after", 8))
        for kind in "ab"
        for language in ("zh", "en")
    }
    lines = accuracy_lines(scores)
    assert [(line.kind, line.language) for line in lines] == [
        ("a", "en"), ("a", "zh"), ("b", "en"), ("b", "zh"), ("", "en"), ("", "zh"), ("", "")
    ]  # fmt: skip
    last = lines[-1]
    assert (last.before.correct, last.after.correct, last.after.total) == (8, 32, 40)


def test_one_stage_alone() -> None:
    lines = accuracy_lines({("before", "a", "en"): Score(correct=4, total=10)})
    assert [bool(line.after) for line in lines] == [False, False]
    assert lines[-1].best.correct == 4 and not lines[-1].is_regression
    assert accuracy_lines({}) == change_lines({}) == []


def test_changes_are_of_kinds_then_languages_then_all() -> None:
    before = [row("tool", 20), row("who", 13), row("tool", 20, "zh"), row("who", 10, "zh")]
    after = [row("tool", 0), row("who", 8), row("tool", 1, "zh"), row("who", 12, "zh")]
    found = change_lines(scores_from_rows(before, after))
    assert [(line.name, line.before.correct, line.after.correct, line.before.total) for line in found] == [
        ("tool", 40, 1, 40),
        ("who", 23, 20, 40),
        ("en", 33, 8, 40),
        ("zh", 30, 13, 40),
        ("all", 63, 21, 80),
    ]
    assert [line.name for line in found if line.is_regression] == ["tool", "en", "zh", "all"]


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (40, 37, False),  # all of n right: the interval's lower end is n / (n + 1.96^2) = 0.912, and 36.5 of 40
        (40, 36, True),
        (0, 0, False),
        (20, 15, False),  # half of 40: 0.352, and 14.1 of 40
        (20, 14, True),
        (20, 40, False),
    ],
)
def test_lost_is_what_fell_below_the_interval_it_had(before: int, after: int, lost: bool) -> None:
    found = change_lines(scores_from_rows([row("sum", before, asked=40)], [row("sum", after, asked=40)]))
    assert [(line.name, line.is_regression) for line in found] == [("sum", lost), ("all", lost)]
