"""From ids to text while it is being written: never half a character, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penjing.data.chat.turn_parser import Kind
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what is shown for bytes that are no character, or not yet


class TextStream:
    """Ids in, text out. All pieces together are `tokenizer.decode` of all ids, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, [text for text in stop_strings if text]
        self.stopped = False  # a stop string was said
        self._ids: list[int] = []  # the last ones: those before `_fresh` are shown, and what follows is read with them
        self._fresh = 0
        self._held = ""  # text that may become a stop string
        self._ready = ""

    def watch(self, index: int) -> bool:
        """Take one more id; whether a stop string is complete (see `Request.watch`). The text waits for `take`."""
        return self.extend((index,))

    def extend(self, ids: Sequence[int]) -> bool:
        """`watch` for several ids, decoded at once."""
        if not self.stopped:
            self._hold_back(self._decode(ids))
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

    def _decode(self, ids: Sequence[int]) -> str:
        """The text that is new, if it ends with a whole character."""
        self._ids += ids
        new = self._rest()
        if not new or new.endswith(_BROKEN):  # which may be the first bytes of a character
            return ""
        # What comes next is decoded together with the ids that are shown now: a decoder may look at what stands before.
        self._ids, self._fresh = self._ids[self._fresh :], len(self._ids) - self._fresh
        return new

    def _rest(self) -> str:
        """The text of the ids that are not shown."""
        return self.tokenizer.decode(self._ids)[len(self.tokenizer.decode(self._ids[: self._fresh])) :]

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
    """Ids in; thoughts, words and calls out, while they are written.

    Pieces put together are what `turn_parser.parse` reads in the whole turn: of its message the reasoning, its content,
    and the text of each call. thinking: as for `parse`. Stop strings are looked for between marks.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None = None, stop_strings: Sequence[str] = ()) -> None:
        self._marks = {tokenizer.control(mark): mark for mark in tokens.VISIBLE_TOKENS if tokenizer.has(mark)}
        self._spelled = [mark for mark in tokens.VISIBLE_TOKENS if not tokenizer.has(mark)]  # read from the text
        self._tokenizer, self._stop_strings, self._stop = tokenizer, stop_strings, tokenizer.stop
        self._plain = TextStream(tokenizer, stop_strings)  # since the last mark
        self._unsplit = ""  # text that may become a spelled mark
        self._turn = _Turn(thinking)
        self.stopped = False

    def watch(self, index: int) -> bool:
        """Take one more id; whether a stop string is complete. What is new waits for `take`."""
        return self.extend((index,))

    def extend(self, ids: Sequence[int]) -> bool:
        """`watch` for several ids: what stands between two marks is decoded at once."""
        plain: list[int] = []
        for index in ids:
            if index in self._marks:
                self._say(plain)
                self._mark(index)
                plain = []
            elif index not in self._stop:
                plain.append(index)
        self._say(plain)
        return self.stopped

    def _say(self, ids: Sequence[int]) -> None:
        if ids and not self.stopped:
            self.stopped = self._plain.extend(ids)
            self._text(self._plain.take(), is_last=self.stopped)

    def _mark(self, index: int) -> None:
        if not self.stopped:
            self._text(self._plain.finish(), is_last=True)
            self._plain = TextStream(self._tokenizer, self._stop_strings)
            self._turn.mark(self._marks[index])

    def take(self) -> list[Piece]:
        """What is new of the turn since the last call."""
        pieces, self._turn.pieces = self._turn.pieces, []
        return pieces

    def add(self, index: int) -> list[Piece]:
        """Take one more id; what is new of the turn."""
        self.watch(index)
        return self.take()

    def finish(self) -> list[Piece]:
        """What waits for something to follow: nothing will."""
        self._text(self._plain.finish(), is_last=True)
        self._turn.finish()
        return self.take()

    def _text(self, text: str, *, is_last: bool) -> None:
        text = self._unsplit + text
        while found := [(text.index(mark), mark) for mark in self._spelled if mark in text]:
            place, mark = min(found)
            self._turn.text(text[:place])
            self._turn.mark(mark)
            text = text[place + len(mark) :]
        held = 0 if is_last else max((_overlap(text, mark) for mark in self._spelled), default=0)
        self._unsplit = text[len(text) - held :]
        self._turn.text(text[: len(text) - held])


class _Turn:
    """Marks and text in, pieces out: `turn_parser` while the turn is written. What may yet be left out is held back:
    blanks around a thought, blanks and marks out of place before words, a newline before a call."""

    def __init__(self, thinking: bool | None) -> None:
        self.pieces: list[Piece] = []
        self._kind: Kind = "thought" if thinking else "words"
        self._number = 0
        self._may_think = thinking is None
        self._after_call = False
        self._has_text = self._is_stray = False  # in this stretch: more than blanks and marks; marks out of place
        self._has_words = self._has_thought = False  # some were shown
        self._held = ""

    def mark(self, mark: str) -> None:
        if self._kind == "thought" and mark == tokens.END_THINK:
            self._next("words")
        elif self._kind == "thought" and mark == tokens.THINK and not self._has_text:
            pass  # asked to think, but the model opens its thought itself
        elif self._kind == "words" and mark == tokens.THINK and self._may_think:
            self._kind, self._held, self._may_think = "thought", "", False
        elif self._kind != "thought" and mark == tokens.TOOL_CALL:
            self._next("call")
        elif self._kind == "call" and mark == tokens.END_TOOL_CALL:
            self._next("words")
        elif self._kind == "words":  # out of place
            self._is_stray, self._may_think = True, False
            self._words(self._held + mark)
        else:
            self.text(mark)

    def text(self, text: str) -> None:
        if not text:
            return
        self._has_text = self._has_text or bool(text.strip())
        if self._kind == "call":
            self._tell(text)
        elif self._kind == "thought":
            self._thought(self._held + text)
        else:
            self._words(self._held + text)
        self._may_think = self._may_think and not self._has_text

    def _thought(self, text: str) -> None:
        if not self._has_text:
            return
        whole = text.rstrip()
        self._tell(whole if self._has_thought else whole.lstrip())
        self._has_thought, self._held = True, text[len(whole) :]

    def _words(self, text: str) -> None:
        if not self._has_text:
            self._held = text
            return
        if self._after_call:
            text = text.removeprefix("\n")
            text = "\n" + text if self._has_words else text
            self._after_call = False
        if not self._has_words:
            text = text.lstrip("\n")
        self._held = "\n" if text.endswith("\n") else ""
        self._tell(text.removesuffix("\n"))

    def _end_words(self, held: str) -> None:
        """What was held back at the end of words: nothing is left of marks alone, nor of blanks behind a call."""
        if self._has_text or not (self._is_stray or self._after_call):
            self._tell(held if self._has_words else held.lstrip("\n"))

    def _tell(self, text: str, *, closed: bool = False) -> None:
        if text or closed:
            self.pieces.append(Piece(self._kind, self._number, text, closed))
        if self._kind == "words":
            self._has_words = self._has_words or bool(text)

    def _next(self, kind: Kind) -> None:
        """The stretch ends, and another begins."""
        was_call = self._kind == "call"
        if self._kind == "words":
            self._end_words(self._held.removesuffix("\n"))
        elif not (was_call and kind == "call"):
            self._tell("", closed=True)
        self._kind, self._number, self._held = kind, self._number + 1, ""
        self._has_text = self._is_stray = self._may_think = False
        self._after_call = was_call and kind == "words"

    def finish(self) -> None:
        if self._kind == "words":
            self._end_words(self._held)
        self._held = ""
