"""What counts as lost between two times of asking: by hand."""

import pytest

from penjing.eval.changes import changes


def row(kind, right, language="en", asked=20):
    return {"kind": kind, "language": language, "asked": asked, "right": right, "chance": 0.0}


def test_kinds_then_languages_then_all():
    before = [row("tool", 20), row("who", 13), row("tool", 20, "zh"), row("who", 10, "zh")]
    after = [row("tool", 0), row("who", 8), row("tool", 1, "zh"), row("who", 12, "zh")]
    found = changes(before, after)
    assert [str(each) for each in found] == [
        "tool 40 -> 1 of 40",
        "who 23 -> 20 of 40",
        "en 33 -> 8 of 40",
        "zh 30 -> 13 of 40",
        "all 63 -> 21 of 80",
    ]
    assert [each.name for each in found if each.is_lost] == ["tool", "en", "zh", "all"]


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
def test_lost_is_what_fell_below_the_interval_it_had(before, after, lost):
    found = changes([row("sum", before, asked=40)], [row("sum", after, asked=40)])
    assert [(each.name, each.is_lost) for each in found] == [("sum", lost), ("all", lost)]


def test_of_no_questions_nothing_is_known():
    assert changes([], []) == []
