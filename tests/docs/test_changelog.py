"""CHANGELOG.md has the metrics that were renamed."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_renamed_metrics_have_their_new_names():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/penjing").rglob("*.py"))
    renamed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.split("### Metrics", 1)[1], flags=re.MULTILINE)
    assert len(renamed) >= 10
    assert not [new for old, new in renamed if f'"{new}"' not in code or f'"{old}"' in code]
