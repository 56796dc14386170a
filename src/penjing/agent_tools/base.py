"""What a tool is given and what it gives."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from penjing.base.config import PositiveFloat, PositiveInt, Settings


class BadArgumentsError(Exception):
    """The model asked for something that cannot be done; the text is told to it, and nothing stops."""


@dataclass(frozen=True, kw_only=True)
class ToolSettings(Settings, section="objective.tool"):
    """What tools need to know. Each reads only its own settings (penjing.agent_tools)."""

    removed: ClassVar = {"table": "", "today": "2025-01-01"}

    output_characters: PositiveInt = 400  # longest result; more is cut off
    seconds: PositiveFloat = 5.0  # python, and tools of your own: the longest that one call may take
    mebibytes: PositiveInt = 256  # python: memory of one call


class Tool(Protocol):
    """schema: the function in OpenAI's form: name, description, parameters (a JSON schema). One with `result_is_answer
    = True` ends a turn: nothing is to be said after its result."""

    @property
    def schema(self) -> dict[str, Any]: ...

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as the model reads it. Raises BadArgumentsError with a line for the model."""
        ...


def function(name: str, description: str, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A schema whose arguments are all texts: their names, and what each says."""
    properties = {name: {"type": "string", "description": text} for name, text in arguments.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(arguments)},
    }


def text(arguments: Mapping[str, Any], name: str, *, longest: int = 2000) -> str:
    """An argument as text; numbers are taken too. Raises BadArgumentsError."""
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadArgumentsError(f"argument {name} is missing" if value is None else f"argument {name} is not text")
    try:
        written = str(value)
    except ValueError:  # whole numbers of thousands of digits
        raise BadArgumentsError(f"argument {name} is too long") from None
    if len(written) > longest:
        raise BadArgumentsError(f"argument {name} is too long")
    return written
