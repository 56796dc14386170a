"""The blocks of CONTRIBUTING.md's pages that add something: one file and one line of a table."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def blocks(title: str) -> tuple[str, str, str]:
    """Of the section `title`: the file's code, and name and place of the line."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    code, line = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    name, place = line.strip(' ",\n').split('": "')
    return code, name, place


def add(title: str, package: ModuleType, table: dict[str, str], folder: Path, monkeypatch) -> str:
    """Follow the section `title` for the length of a test; returns the name of the line."""
    code, name, place = blocks(title)
    (folder / f"{place.partition(':')[0].rpartition('.')[2]}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    monkeypatch.setitem(table, name, place)
    return name
