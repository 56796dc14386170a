"""Where the lines of `penjing chat` come from: in a terminal readline, with a history, else plain input."""

import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from penjing.base.user_dir import cache_dir

HISTORY, LONGEST_HISTORY = "chat_history", 1000  # in the user's cache; lines
Reader = Callable[[], str]
"""The next line, which may hold line breaks. Raises EOFError where there is none."""


def is_interactive(console: Console) -> bool:
    """Whether a person types and reads."""
    return console.is_terminal and sys.stdin.isatty()


def make_reader(console: Console, commands: Collection[str]) -> Reader:
    if not is_interactive(console):
        return lambda: console.input(Text("> ", style="bold"))
    with suppress(ImportError):  # a Python without readline: lines without history and completion
        _set_up_readline(commands)
    return read_line


def read_line() -> str:
    """A line that a person types. Alt+Enter breaks it, as does a backslash at its end; Ctrl-C clears it."""
    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('. ')}"
        except KeyboardInterrupt:
            print("  (Ctrl-D ends)")
        else:
            return line


def _set_up_readline(commands: Collection[str]) -> None:
    """History, and completion of commands by Tab."""
    import atexit
    import readline

    def completed(text: str, number: int) -> str | None:
        return [*(name for name in commands if text and name.startswith(text)), None][number]

    readline.set_completer_delims("")
    readline.set_completer(completed)
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt+Enter
    readline.set_history_length(LONGEST_HISTORY)
    if path := _history_file():
        with suppress(OSError):
            readline.read_history_file(path)

        @atexit.register
        def save() -> None:
            with suppress(OSError):
                readline.write_history_file(path)


def _history_file() -> Path | None:
    """The file of earlier lines, which nobody else may read; None where there can be none."""
    with suppress(OSError, RuntimeError):
        path = cache_dir() / HISTORY
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(handle, 0o600)
        os.close(handle)
        return path
    return None
