"""The commands and settings of the page on tools are real, and so is what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from penjing.agent_tools import TOOLS
from penjing.agent_tools.box import Toolbox
from penjing.base import config
from penjing.cli import app
from penjing.commands.train import resolve_run

PAGE = (Path(__file__).parents[2] / "docs/methods/tools.md").read_text(encoding="utf-8")
COMMANDS = [
    words[words.index("penjing") + 1 :]
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for words in map(shlex.split, block.splitlines())
]


def test_there_are_commands() -> None:
    assert {words[0] for words in COMMANDS} == {"data", "train", "chat", "generate"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_exist(words: list[str]) -> None:
    command = get_command(app)
    while getattr(command, "commands", None):
        assert words[0] in command.commands
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
    if command.name == "train":
        resolve_run(words[0], config.parse_overrides(word for word in words[1:] if not word.startswith("init_from=")))


def test_settings_and_tools_exist() -> None:
    keys = re.findall(r"`((?:objective|data)\.[a-z_.]+)(?:=[^`]*)?`", PAGE)
    assert len(keys) >= 10
    for key in keys:
        table = config.to_dict(resolve_run("grpo"))
        for name in key.split("."):
            assert name in table, key
            table = table[name]
    assert re.findall(r"^\| `([a-z]+)` \|", PAGE, flags=re.MULTILINE) == list(TOOLS)


def test_the_tool_that_is_shown_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.data.chat.turn_parser import ToolCall

    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "page_tools.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    (result,) = Toolbox(["page_tools:Shout"]).run([ToolCall(name="shout", arguments={"text": "hi"})])
    assert (result.text, result.worked) == ("HI", True)
