"""The terminal's short rendering: the same facts, no markup or escape sequence taken from a text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from report_synthetic import PARTS, write_folder
from rich.console import Console

from penjing.report.terminal import print_summary


def printed(folder: Path, width: int = 100) -> str:
    stream = io.StringIO()
    print_summary(folder, Console(file=stream, width=width, force_terminal=False, color_system=None))
    return stream.getvalue()


def test_says_the_same_facts(tmp_path: Path) -> None:
    words = " ".join(printed(write_folder(tmp_path, bad="")).split())
    assert "answers 68% of 400 questions right" in words and "68% (63–72)" in words
    assert "time 16 min 05 s → 16 min 49 s (+4.6%)" in words
    assert "从前有一棵小松树，它站在窗边" in words and "Next: penjing chat runs/quickstart" in words


def test_markup_and_escapes_are_inert(tmp_path: Path) -> None:
    words = printed(write_folder(tmp_path, bad="[bold]x[/nope]\x1b]0;title\x07"), width=400)
    assert "[bold]x[/nope]" in words and "\x1b" not in words and "\x07" not in words


@pytest.mark.parametrize("part", PARTS)
def test_any_part_may_be_missing(tmp_path: Path, part: str) -> None:
    (write_folder(tmp_path) / part).unlink()
    assert "trained from nothing" in printed(tmp_path)  # one of the two outcomes is always there


def test_nothing_at_all(tmp_path: Path) -> None:
    assert "No stage has finished training" in printed(tmp_path)
