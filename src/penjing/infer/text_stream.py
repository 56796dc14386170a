"""From ids to text while it is being written: never half a character, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penjing.data.chat.turn_parser import Kind, TurnParser, TurnSpan, split_marks
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, VISIBLE_TOKENS, Tokenizer

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
        held = max(overlap(text, stop) for stop in self.stop_strings)
        self._ready, self._held = self._ready + text[: len(text) - held], text[len(text) - held :]


def overlap(text: str, stop: str) -> int:
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

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None = None, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_strings = tokenizer, stop_strings
        self._marks = {tokenizer.control(mark): mark for mark in VISIBLE_TOKENS if tokenizer.has(mark)}
        self._spelled = [mark for mark in VISIBLE_TOKENS if not tokenizer.has(mark)]
        self._parser = TurnParser(thinking)
        self._text = TextStream(tokenizer, stop_strings)
        self._held = ""  # text that may become a mark, where marks are spelled
        self._shown: list[int] = []  # characters of each stretch
        self._closed: set[int] = set()

    @property
    def spans(self) -> list[TurnSpan]:
        """The whole turn so far."""
        return self._parser.spans

    def add(self, index: int) -> list[Piece]:
        """Take one more id; what is new of the turn."""
        self.take(index)
        return self._new()

    def take(self, index: int) -> None:
        """Take one more id; `spans` shows what has become of it."""
        if self._text.stopped or index in self._tokenizer.stop:
            return
        if index in self._marks:
            self._end_of_text()
            self._parser.add(True, self._marks[index])
            self._text = TextStream(self._tokenizer, self._stop_strings)
        else:
            self._say(self._text.add(index))

    def close_call(self) -> None:
        """Say the end of the call that is being written, which nobody had to."""
        self._end_of_text()
        self._parser.add(True, END_TOOL_CALL)

    def finish(self) -> list[Piece]:
        """The turn has ended: what waits for something to follow is text too."""
        self._end_of_text()
        return self._new(ended=True)

    def _end_of_text(self) -> None:
        self._say(self._text.finish())
        if self._held:
            self._parser.add(False, self._held)
            self._held = ""

    def _say(self, text: str) -> None:
        """Add text, cut at the marks that are spelled in it."""
        if not self._spelled:
            if text:
                self._parser.add(False, text)
            return
        *pieces, (is_mark, last) = split_marks(self._held + text, self._spelled) or [(False, "")]
        held = 0 if is_mark else max(overlap(last, mark) for mark in self._spelled)
        self._held = last[len(last) - held :]
        for piece in (*pieces, (is_mark, last[: len(last) - held])):
            if piece[1]:
                self._parser.add(*piece)

    def _new(self, *, ended: bool = False) -> list[Piece]:
        pieces, spans = [], self.spans
        if len(spans) == 1 and not (spans[0].text.strip() or spans[0].closed or ended):
            return []  # blanks at the beginning are forgotten where a thought follows
        for number, part in enumerate(spans):
            if number == len(self._shown):
                self._shown.append(0)
            new = part.text[self._shown[number] :]
            closes = part.closed and number not in self._closed
            if new or closes:
                pieces.append(Piece(part.kind, number, new, part.closed))
                self._shown[number] = len(part.text)
            if closes:
                self._closed.add(number)
        return pieces
