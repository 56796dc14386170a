"""CHANGELOG.md has every setting that was renamed, and every command that moved."""

import re
from pathlib import Path

from penjing.cli import MOVED
from penjing.train.renamed_settings import RENAMED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_renamed_settings_are_in_the_table():
    assert RENAMED
    assert not [old for old, new in RENAMED.items() if f"| `{old}` | `{new}` |" not in PAGE]


def test_moved_commands_are_in_the_table():
    assert MOVED
    assert not [old for old, new in MOVED.items() if f"| `penjing {old}` | `penjing {new}` |" not in PAGE]


def test_renamed_metrics_have_their_new_names():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/penjing").rglob("*.py"))
    renamed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.split("### Metrics", 1)[1], flags=re.MULTILINE)
    assert len(renamed) >= 10
    assert not [new for old, new in renamed if f'"{new}"' not in code or f'"{old}"' in code]
