"""Where the lines of `penjing chat` come from: an editor with a history in a terminal, else plain input."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.text import Text

from penjing.base.user_dir import cache_dir

if TYPE_CHECKING:
    from penjing.commands.chat_commands import ChatCommand

HISTORY = "chat_history"  # in the user's cache
PLAIN = 'history, completion and Alt+Enter need: pip install "penjing[chat]"'


class Reader(Protocol):
    def read(self) -> str:
        """The next line, which may hold line breaks. Raises EOFError where there is none."""


def is_interactive(console: Console) -> bool:
    """Whether a person types and reads."""
    return console.is_terminal and sys.stdin.isatty()


def make_reader(console: Console, commands: Mapping[str, ChatCommand]) -> Reader:
    """An editor where a person types, if prompt_toolkit is installed; says once if it is not."""
    if not is_interactive(console):
        return PlainReader(console)
    try:
        return EditorReader(commands)
    except ImportError:
        console.print(PLAIN, style="dim", highlight=False, markup=False)
        return PlainReader(console, goes_on=True)


class PlainReader:
    """goes_on: a backslash at the end of a line joins the next one to it."""

    def __init__(self, console: Console, *, goes_on: bool = False) -> None:
        self.console, self.goes_on = console, goes_on

    def read(self) -> str:
        line = self.console.input(Text("> ", style="bold"))
        while self.goes_on and line.endswith("\\"):
            line = f"{line[:-1]}\n{self.console.input(Text('. ', style='bold'))}"
        return line


class EditorReader:
    """Lines by prompt_toolkit. Raises ImportError without it."""

    def __init__(self, commands: Mapping[str, ChatCommand], **where: Any) -> None:
        """where: input and output, as of prompt_toolkit's session."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        path = _history_file()
        self.session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=". ",
            key_bindings=_keys(),
            history=FileHistory(str(path)) if path else InMemoryHistory(),
            completer=WordCompleter(
                [*commands], sentence=True, meta_dict={name: command.what for name, command in commands.items()}
            ),
            complete_while_typing=True,
            enable_open_in_editor=False,
            **where,
        )

    def read(self) -> str:
        return self.session.prompt()


def _keys() -> Any:
    """Enter ends the input, Alt+Enter or a backslash before Enter breaks the line, Ctrl-C clears it or ends."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=EOFError())

    return keys


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
