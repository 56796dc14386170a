"""The terminal's short rendering: the same facts, no markup or escape sequence taken from a text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from report_synthetic import PARTS, write_folder, write_run
from rich.console import Console

from penjing.report.load_runs import read_record
from penjing.report.terminal import print_summary


def printed(folder: Path, width: int = 100) -> str:
    stream = io.StringIO()
    print_summary(read_record([folder]), Console(file=stream, width=width, force_terminal=False, color_system=None))
    return stream.getvalue()


def test_says_the_same_facts(tmp_path: Path) -> None:
    words = " ".join(printed(write_folder(tmp_path, bad="")).split())
    assert "answers 68% of 400 questions right" in words and "68% (63–72)" in words
    assert "time 16 min 05 s → 16 min 49 s (off by −4.4%)" in words
    assert "Next: penjing chat runs/quickstart" in words and "1.010 below zstd -19" in words


def test_a_run_alone(tmp_path: Path) -> None:
    words = " ".join(printed(write_run(tmp_path / "mine", "reward")).split())
    assert "mine (reward model) is finished: 20 steps" in words and "time 20 s → 21 s" in words


def test_markup_and_escapes_are_inert(tmp_path: Path) -> None:
    words = printed(write_folder(tmp_path, bad="[bold]x[/nope]\x1b]0;title\x07"), width=400)
    assert "[bold]x[/nope]" in words and "\x1b" not in words and "\x07" not in words


@pytest.mark.parametrize("part", PARTS)
def test_any_part_may_be_missing(tmp_path: Path, part: str) -> None:
    (write_folder(tmp_path) / part).unlink()
    assert "trained from nothing" in printed(tmp_path)  # one of the two outcomes is always there
