"""What the parts of the app share: the folder, its paths, and the reading of requests."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool as run_in_thread

from penjing.serve.errors import ApiError
from penjing.serve.limits import BODY_BYTES
from penjing.serve.request_body import read_body

__all__ = ["Body", "Site", "is_shown", "run_in_thread", "text_field"]
_SCHEME = re.compile(r"\b(?:https?|hf)://")
_BETWEEN_PATHS = re.compile(r"""[\s,:="'\[\]{}|]+""")


class Site:
    """The folder that the app was started on. is_closing: whether the server is about to end; streams then end too."""

    def __init__(self, folder: Path, is_closing: Callable[[], bool] = lambda: False) -> None:
        self.folder, self.is_closing = folder.resolve(), is_closing
        self.open_once: dict[str, Path] = {}  # by the server's path: pages that a new window shows once, without token

    def path(self, name: str) -> Path:
        """A path in the folder, resolved. Raises ApiError (403) for one outside, also through a symbolic link."""
        try:
            path = (self.folder / name).resolve()
        except (OSError, ValueError, RuntimeError):
            path = Path("/")
        if not path.is_relative_to(self.folder):
            raise ApiError(403, f"{name[:200]}: outside the folder of this page", code="outside_folder")
        return path

    def check_value(self, value: str) -> None:
        """Raises ApiError (403) for a setting's value of which a part is a path outside the folder."""
        for part in _BETWEEN_PATHS.split(_SCHEME.sub("", value)):
            self.path("/" if part.startswith("~") else part)

    def name(self, path: Path) -> str:
        """A path below the folder as the page names it; `.` is the folder itself."""
        return path.relative_to(self.folder).as_posix()


def is_shown(name: str) -> bool:
    """Whether the page lists files and folders of this name: not hidden ones, nor names that are not UTF-8."""
    return not name.startswith(".") and name.encode(errors="replace").decode() == name


async def read_json(request: Request) -> Mapping[str, Any]:
    """The JSON object in a request's body. Raises ApiError."""
    body = await read_body(request.headers, request.receive, BODY_BYTES)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


Body = Annotated[Mapping[str, Any], Depends(read_json)]  # the JSON object that a route is asked with


def text_field(body: Mapping[str, Any], name: str) -> str:
    """A text in a body. Raises ApiError if there is none."""
    value = body.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ApiError(400, f"{name}: a text is required", param=name)
    return value
