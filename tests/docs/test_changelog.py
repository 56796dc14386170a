"""CHANGELOG.md has every setting that was renamed, and every command that moved."""

from pathlib import Path

from penjing.cli import MOVED
from penjing.train.renamed_settings import RENAMED

PAGE = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")


def test_renamed_settings_are_in_the_table():
    assert RENAMED
    assert not [old for old, new in RENAMED.items() if f"| `{old}` | `{new}` |" not in PAGE]


def test_moved_commands_are_in_the_table():
    assert MOVED
    assert not [old for old, new in MOVED.items() if f"| `penjing {old}` | `penjing {new}` |" not in PAGE]
