"""What a user can cause is a `UserError`: one clear line and exit code 2. All else is a bug and keeps its traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as shells have it: 128 + SIGINT


class UserError(Exception):
    """Something the user can put right.

    `what` says what is wrong; `where` names the file, line or setting; `got` and `wanted` are the two sides of the
    mistake; `next_step` is what to type or change. All of them are joined into one line.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        wanted: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.wanted = wanted
        self.next_step = next_step
        super().__init__(self.line())

    def line(self) -> str:
        text = self.what if self.where is None else f"{self.where}: {self.what}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.wanted is not None:
            text += f"; wanted {self.wanted}"
        if self.next_step is not None:
            text += f". {self.next_step}"
        return " ".join(text.split())


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most like `name`, for "did you mean"; None when nothing is close."""
    choices = list(choices)
    matches = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if matches:
        return matches[0]
    inside = [choice for choice in choices if name in choice or choice in name]
    return inside[0] if inside else None


def suggest(name: str, choices: Iterable[str]) -> str:
    """The part of an error line that helps after a wrong name: the nearest choice, or the list of all."""
    choices = sorted(choices)
    best = nearest(name, choices)
    if best is not None:
        return f"Did you mean {best}?"
    return "Choices: " + ", ".join(choices)
