"""Counts of right answers: intervals against figures worked out by hand, totals, chance."""

from __future__ import annotations

import pytest

from penjing.base.interval import wilson
from penjing.report.accuracy import Score, accuracy_lines, lost_kinds, pool
from penjing.report.load_run import AccuracyRow


def row(stage: str, kind: str, language: str, right: int, asked: int = 10, chance: float | None = 0.25) -> AccuracyRow:
    return AccuracyRow(stage=stage, kind=kind, language=language, asked=asked, right=right, chance=chance)


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
    assert Score(asked=100, right=50, chance=0.25).verdict == "above guessing"
    assert Score(asked=100, right=27, chance=0.25).verdict == "like guessing"
    assert Score(asked=100, right=5, chance=0.25).verdict == "below guessing"
    assert Score(asked=100, right=5, chance=None).verdict == ""


def test_pool_weights_chance_by_questions() -> None:
    score = pool(
        [row("after", "a", "en", 9, 10, 0.5), row("after", "b", "en", 3, 30, 0.1), row("after", "c", "en", 0, 0, 1.0)]
    )
    assert score is not None and (score.right, score.asked) == (12, 40)
    assert score.chance == pytest.approx((5 + 3) / 40)
    assert pool([row("after", "a", "en", 0, 0)]) is None
    unknown = pool([row("after", "a", "en", 1), row("after", "b", "en", 1, chance=None)])
    assert unknown is not None and unknown.chance is None


def test_lines_and_totals() -> None:
    rows = [
        row(stage, kind, language, hits)
        for stage, hits in (("before", 2), ("after", 8))
        for kind in "ab"
        for language in ("zh", "en")
    ]
    lines = accuracy_lines(rows)
    assert [(line.kind, line.language) for line in lines] == [
        ("a", "en"), ("a", "zh"), ("b", "en"), ("b", "zh"), ("", "en"), ("", "zh"), ("", "")
    ]  # fmt: skip
    last = lines[-1]
    assert last.before and last.after and (last.before.right, last.after.right, last.after.asked) == (8, 32, 40)


def test_one_stage_alone_and_repeated_rows() -> None:
    lines = accuracy_lines([row("before", "a", "en", 1), row("before", "a", "en", 4), row("other", "a", "en", 9)])
    assert [line.after for line in lines] == [None, None]
    assert lines[-1].best and lines[-1].best.right == 4
    assert accuracy_lines([]) == []


def test_what_was_lost_lies_below_the_interval_from_before() -> None:
    # 18 of 20 right before, over two languages: the 95 % interval begins at 0.699.
    rows = [row("before", "a", language, 9) for language in ("en", "zh")]
    assert not lost_kinds([*rows, row("after", "a", "en", 7), row("after", "a", "zh", 7)])
    lost = lost_kinds([*rows, row("after", "a", "en", 7), row("after", "a", "zh", 6)])
    assert [(line.kind, line.after and line.after.right) for line in lost] == [("a", 13)]
