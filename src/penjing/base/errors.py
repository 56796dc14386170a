"""`UserError` is a mistake the user can correct: one line, exit code 2. Other exceptions are bugs, with a traceback."""

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

EXIT_USER_ERROR = 2
EXIT_FOLLOWED = 3  # of a rank that ends because another one did
EXIT_SMALLER_PASSES = 75  # of a rank that is out of memory; EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED = 130  # the shells' convention: 128 + SIGINT


class UserError(Exception):
    """A mistake that the user can correct. what: the mistake. where: the file, line or setting. got, wanted: the actual
    and the allowed value. next_step: what to type or change. All of them are joined into one line."""

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


def missing_extra(package: str, extra: str = "data", where: object = None) -> UserError:
    """The error for a package that an extra of penjing installs."""
    next_step = f'Install it: pip install "penjing[{extra}]"'
    return UserError(f"the {package} package is needed", where=where, next_step=next_step)


def import_extra(module: str, extra: str = "data", where: object = None) -> Any:
    """A module of a package that an extra of penjing installs. Raises UserError if it is not there."""
    try:
        return import_module(module)
    except ImportError:
        raise missing_extra(module.partition(".")[0], extra, where) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or a device has no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter: torch's
        return True
    said = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in said)


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `name`, for "did you mean"; None if nothing is close."""
    choices = list(choices)
    similar = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return next(iter(similar or [choice for choice in choices if name in choice or choice in name]), None)


def suggest(name: str, choices: Iterable[str]) -> str:
    """The hint after a wrong name: the nearest choice, or else all choices."""
    choices = sorted(choices)
    best = nearest(name, choices)
    return f"Did you mean {best}?" if best is not None else "Choices: " + ", ".join(choices)


def own_line(error: Exception) -> str:
    """FILE:LINE of the user's own code at which an error was raised; empty if none of it was running."""
    others = ("<", str(Path(__file__).parents[1]), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")))
    frames = traceback.extract_tb(error.__traceback__)
    return next((f"{one.filename}:{one.lineno}" for one in reversed(frames) if not one.filename.startswith(others)), "")


@contextmanager
def user_code(code: object, got: str | None = None) -> Iterator[None]:
    """Raises UserError, with the line, for an error of the user's own code (not of penjing's: a bug; nor if memory ran
    out). code: the class, function or object that is called. got: what it works on."""
    kind: Any = code if hasattr(code, "__qualname__") else type(code)
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error) or kind.__module__.startswith("penjing."):
            raise
        where = ", ".join(filter(None, (f"{kind.__module__}:{kind.__qualname__}", own_line(error))))
        hint = "Mend it; the same command continues."
        raise UserError(f"{type(error).__name__}: {error}", where=where, got=got, next_step=hint) from error
