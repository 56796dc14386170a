"""Charts of characters, against points worked out by hand."""

import pytest

from penjing.report.text_chart import text_chart


def test_a_straight_line_is_a_diagonal():
    lines = text_chart([{1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}], width=12, height=4, ascii=True)
    assert lines == ["      4 *", "         *", "          *", "      1    *", "        step 1" + "4"]


def test_dots_are_finer_than_characters():
    """Four characters of 2 x 4 dots: a line from the top left dot to the bottom right one."""
    lines = text_chart([{0: 1.0, 7: 0.0}], width=12, height=2)
    dots = {(x, y) for x in range(8) for y in range(8) if _dot(lines, x, y)}
    assert dots == {(i, i) for i in range(8)}


def _dot(lines, x, y):
    line, column = lines[y // 4][8:], x // 2
    cell = ord(line[column]) - 0x2800 if column < len(line) and line[column] != " " else 0
    return cell & ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))[x % 2][y % 4]


def test_many_steps_in_a_column_are_their_mean():
    curve = {step: float(step % 2) for step in range(4000)}
    lines = text_chart([curve], width=28, height=5, ascii=True)
    assert [line.count("*") for line in lines[:5]] == [0, 0, 20, 0, 0]


def test_the_steep_beginning_does_not_flatten_the_rest():
    curve = {step: 100.0 if step == 0 else 2.0 - step / 100 for step in range(100)}
    assert text_chart([curve], width=40, height=6)[0].split()[0].startswith("1.9")


@pytest.mark.parametrize("curves", [[], [{}]])
def test_without_points_there_is_no_chart(curves):
    assert text_chart(curves, width=40, height=6) == []


def test_one_point_and_a_constant_are_drawn():
    for curve in ({5: 2.0}, {1: 2.0, 9: 2.0}, {1: -1e30}):
        lines = text_chart([curve], width=20, height=3, ascii=True)
        assert "*" in lines[1] and len(lines) == 4
