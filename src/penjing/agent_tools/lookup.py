"""What a table says about a key. The table is a JSON file of the user's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penjing.agent_tools.base import BadArgumentsError, ToolSettings, function, text
from penjing.base.errors import UserError
from penjing.base.files import read_json


class Lookup:
    schema = function("lookup", "Look something up in a table.", {"key": "what to look up"})

    def __init__(self, settings: ToolSettings) -> None:
        """Raises UserError if there is no table, or it is none."""
        if not settings.table:
            raise UserError("the tool lookup needs a table", where="objective.tool.table", wanted="a JSON file")
        path = Path(settings.table)
        if not path.is_file():
            raise UserError("no such file", where=path)
        table = read_json(path)
        if not isinstance(table, dict) or not table:
            raise UserError("not a table", where=path, got=type(table).__name__, wanted='{"key": "text", ...}')
        self.table = {_folded(key): value for key, value in table.items()}

    def call(self, arguments: Mapping[str, Any]) -> str:
        key = text(arguments, "key")
        if _folded(key) not in self.table:
            raise BadArgumentsError("nothing is known about that")
        value = self.table[_folded(key)]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _folded(key: str) -> str:
    return " ".join(key.casefold().split())
