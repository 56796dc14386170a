"""How answers look in a terminal."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from penjing.base.markup import printable
from penjing.data.chat.turn_parser import Kind
from penjing.infer.conversation import ChatEvent, TextDelta, TurnEnd
from penjing.infer.text_stream import SpanDelta


class Screen:
    """Shows an answer while it is written: reasoning dim and apart from the words, each tool call on its own line."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._begin()

    def show(self, answer: Iterable[ChatEvent]) -> None:
        for part in answer:
            if isinstance(part, TextDelta):
                self.write(part.spans)
            elif isinstance(part, TurnEnd):
                self.end()
                if self.console.is_terminal:
                    self.console.print(Text(_summary(part), style="dim"))
                self._begin()
            else:
                self.console.print(f"  = {printable(part.text)}", style="cyan", highlight=False, markup=False)

    def _begin(self) -> None:
        self.kind: Kind = "content"  # of the stretch that is being written
        self.number = -1  # of that stretch
        self.waiting = ""  # line ends, which wait for what follows; a whole call

    def write(self, pieces: Sequence[SpanDelta]) -> None:
        """Print what is new."""
        for piece in pieces:
            text = piece.text
            if text and piece.number != self.number:
                if self.number >= 0:
                    self._close()
                self.kind, self.number, self.waiting = piece.kind, piece.number, ""
                text = text.lstrip("\n") if piece.number else text
                if piece.kind == "reasoning":
                    self.console.print("thinking: ", style="dim", end="")
            self._more(text)

    def end(self) -> None:
        """Print what still waits, and the end of the line."""
        if self.kind == "content":
            self._out(self.waiting)
        self._close()

    def _more(self, text: str) -> None:
        text = self.waiting + text
        shown = "" if self.kind == "tool_call" else text.rstrip("\n")
        self._out(shown)
        self.waiting = text[len(shown) :]

    def _out(self, text: str) -> None:
        if text:
            self.console.out(
                printable(text), end="", style="dim" if self.kind == "reasoning" else None, highlight=False
            )

    def _close(self) -> None:
        if self.kind == "tool_call":
            self.console.print(f"  {printable(_call_line(self.waiting))}", style="cyan", highlight=False, markup=False)
            return
        self.console.out("\n" if self.kind == "reasoning" else "", highlight=False)


def _summary(turn: TurnEnd) -> str:
    """Such as `42 tokens, 89/s, first after 120 ms, prompt 512 (30 new); stopped`."""
    rate = f", {turn.tokens_per_second:,.0f}/s" if turn.tokens_per_second else ""
    new = f" ({turn.prompt_tokens - turn.cached_tokens:,} new)" if turn.cached_tokens else ""
    prompt = f"first after {1000 * turn.first_token_seconds:,.0f} ms, prompt {turn.prompt_tokens:,}{new}"
    ended = {"cancelled": "; stopped", "length": "; cut at the longest"}.get(turn.finish_reason, "")
    return f"{turn.tokens:,} tokens{rate}, {prompt}{ended}"


def _call_line(text: str) -> str:
    """`calculator(expression=1+2)`; a malformed call as it is."""
    try:
        call: Any = json.loads(text)
        words = ", ".join(f"{name}={value}" for name, value in call["arguments"].items())
        return f"{call['name']}({words})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return " ".join(text.split())
