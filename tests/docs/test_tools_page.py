"""The page on tools has all of them, and the one that it shows works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penjing.agent_tools import TOOLS
from penjing.agent_tools.box import Toolbox

PAGE = (Path(__file__).parents[2] / "docs/methods/tools.md").read_text(encoding="utf-8")


def test_every_tool_has_its_row() -> None:
    assert re.findall(r"^\| `([a-z]+)` \|", PAGE, flags=re.MULTILINE) == list(TOOLS)


def test_the_tool_that_is_shown_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.data.chat.turn_parser import ToolCall

    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "page_tools.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    (result,) = Toolbox(["page_tools:Shout"]).run([ToolCall(name="shout", arguments={"text": "hi"})])
    assert (result.text, result.worked) == ("HI", True)
