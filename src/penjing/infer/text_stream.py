"""From ids to text while it is being written: never half a character, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penjing.data.chat.turn_parser import Kind, parts
from penjing.data.tokenizer.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what is shown for bytes that are no character, or not yet


class TextStream:
    """Ids in, text out. All pieces together are `tokenizer.decode` of all ids, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, [text for text in stop_strings if text]
        self.stopped = False  # a stop string was said
        self._ids: list[int] = []  # the last ones: those before `_fresh` are shown, and what follows is read with them
        self._fresh = 0
        self._shown = 0  # characters after those of the ids before `_fresh`
        self._held = ""  # text that may become a stop string
        self._ready = ""

    def watch(self, index: int) -> bool:
        """Take one more id; whether a stop string is complete (see `Request.watch`). The text waits for `take`."""
        if not self.stopped:
            self._hold_back(self._decode(index))
        return self.stopped

    def take(self) -> str:
        """The text that can be shown since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def add(self, index: int) -> str:
        """Take one more id; the text that can now be shown."""
        self.watch(index)
        return self.take()

    def finish(self) -> str:
        """The text that waits for something to follow: nothing will."""
        if not self.stopped:
            self._hold_back(self._rest())
            self._ready, self._held = self._ready + self._held, ""
        return self.take()

    def _decode(self, index: int) -> str:
        self._ids.append(index)
        text = self._window()
        whole = text.removesuffix(_BROKEN)  # which may be the first bytes of a character
        new, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if text == whole and new:
            # All is shown: what comes next is read together with the ids that were new, as a decoder may look at what
            # stands before.
            self._ids, self._fresh, self._shown = self._ids[self._fresh :], len(self._ids) - self._fresh, 0
        return new

    def _window(self) -> str:
        """The text of the ids that are not shown in full."""
        text = self.tokenizer.decode(self._ids)
        return text[len(self.tokenizer.decode(self._ids[: self._fresh])) :] if self._fresh else text

    def _rest(self) -> str:
        new, self._shown = self._window()[self._shown :], 0
        return new

    def _hold_back(self, new: str) -> None:
        if not self.stop_strings:
            self._ready += new
            return
        text = self._held + new
        found = [place for stop in self.stop_strings if (place := text.find(stop)) >= 0]
        if found:
            self._ready, self._held, self.stopped = self._ready + text[: min(found)], "", True
            return
        held = max(_overlap(text, stop) for stop in self.stop_strings)
        self._ready, self._held = self._ready + text[: len(text) - held], text[len(text) - held :]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)


class Piece(NamedTuple):
    """More of a stretch of a turn. number: the how manyth stretch, from 0. closed: its end was said."""

    kind: Kind
    number: int
    text: str
    closed: bool = False


class TurnStream:
    """Ids in, pieces of thoughts, words and calls out, as `turn_parser.parts` takes a turn apart."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None = None) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self._ids: list[int] = []
        self._shown: list[int] = []  # characters of each stretch
        self._closed: set[int] = set()

    def add(self, index: int) -> list[Piece]:
        """Take one more id; what is new of the turn."""
        self._ids.append(index)
        return self._new(waiting=_BROKEN)

    def finish(self) -> list[Piece]:
        return self._new(waiting="")

    def _new(self, waiting: str) -> list[Piece]:
        pieces = []
        for number, part in enumerate(parts(self.tokenizer, self._ids, thinking=self.thinking)):
            if number == len(self._shown):
                self._shown.append(0)
            text = part.text.removesuffix(waiting) if waiting else part.text
            new = text[self._shown[number] :]
            closes = part.closed and number not in self._closed
            if new or closes:
                pieces.append(Piece(part.kind, number, new, part.closed))
                self._shown[number] = len(text)
            if closes:
                self._closed.add(number)
        return pieces
