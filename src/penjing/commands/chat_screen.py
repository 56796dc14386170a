"""How answers look in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from penjing.data.chat.turn_parser import TurnSpan
from penjing.infer.conversation import Part, TurnEnd, Written


class Screen:
    """Shows an answer while it is written: reasoning dim and apart from the words, each tool call on its own line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begin()

    def show(self, answer: Iterable[Part]) -> None:
        for part in answer:
            if isinstance(part, Written):
                self.spans(part.spans)
            elif isinstance(part, TurnEnd):
                self.end()
                if self.console.is_terminal:
                    self.console.print(Text(_summary(part), style="dim"))
                self._begin()
            else:
                self.console.print(f"  = {part.text}", style="cyan", highlight=False, markup=False)

    def _begin(self) -> None:
        self.part = TurnSpan("words", "")  # that is being written
        self.number = -1  # of that part
        self.shown = 0  # characters of it

    def spans(self, found: Sequence[TurnSpan]) -> None:
        """Print what is new since the last call. Line ends and incomplete characters wait for what follows."""
        for number in range(max(0, self.number), len(found)):
            part = found[number]
            if not part.text.strip() and (part.kind == "thought" or (part.kind == "words" and number > 0)):
                continue  # an empty thought, or the newline between two calls
            if number != self.number:
                if self.number >= 0:
                    self._close()
                self.number, self.shown = number, 0
                if part.kind == "thought":
                    self.console.print("thinking: ", style="dim", end="")
            self.part = part
            self._more("\n\ufffd")

    def end(self) -> None:
        """Print what still waits, and the end of the line."""
        self._more("" if self.part.kind == "words" else "\n")
        self._close()

    def _more(self, waiting: str) -> None:
        if self.part.kind == "call":
            return
        is_first = self.part.kind == "words" and self.number == 0
        text = self.part.text if is_first else self.part.text.lstrip("\n")
        text = text.rstrip(waiting) if waiting else text
        if len(text) > self.shown:
            style = "dim" if self.part.kind == "thought" else None
            self.console.out(text[self.shown :], end="", style=style, highlight=False)
            self.shown = len(text)

    def _close(self) -> None:
        if self.part.kind == "call":
            self.console.print(f"  {_call_line(self.part.text)}", style="cyan", highlight=False, markup=False)
            return
        self.console.out("\n" if self.part.kind == "thought" else "", highlight=False)


def _summary(turn: TurnEnd) -> str:
    """Such as `42 tokens, 89/s, first after 120 ms, prompt 512 (30 new); stopped`."""
    rate = f", {turn.tokens_per_second:,.0f}/s" if turn.tokens_per_second else ""
    new = f" ({turn.prompt_tokens - turn.shared:,} new)" if turn.shared else ""
    prompt = f"first after {1000 * turn.first_token_seconds:,.0f} ms, prompt {turn.prompt_tokens:,}{new}"
    ended = {"cancelled": "; stopped", "length": "; cut at the longest"}.get(turn.ended, "")
    return f"{turn.tokens:,} tokens{rate}, {prompt}{ended}"


def _call_line(text: str) -> str:
    """`calculator(expression=1+2)`; a malformed call as it is."""
    try:
        call: Any = json.loads(text)
        words = ", ".join(f"{name}={value}" for name, value in call["arguments"].items())
        return f"{call['name']}({words})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return " ".join(text.split())
