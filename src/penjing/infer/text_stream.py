"""Incremental detokenization: never half a character, and no text that may become a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from penjing.data.chat.turn_parser import Kind
from penjing.data.tokenizer import tokenizer as tokens
from penjing.data.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoding returns for bytes that are not a complete character
_MAX_PENDING = 8  # ids: two characters of 4 bytes, each a token


class TextStream:
    """Ids in, text out. All deltas joined are `tokenizer.decode` of all ids, up to the first stop string.

    One exception: of a damaged run of byte tokens (`<0xF0>`), `decode` loses all characters, a stream only those that
    are damaged.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, [text for text in stop_strings if text]
        self.stopped = False  # a stop string is complete
        self._ids: list[int] = []  # the last ids; the first `_num_shown` were returned and are context
        self._num_shown = 0
        self._pending = ""  # text that may become a stop string
        self._ready = ""

    def extend(self, ids: Sequence[int]) -> bool:
        """Add ids, decoded at once; returns whether a stop string is complete (see `Request.should_stop`). `take`
        returns the text."""
        if not self.stopped:
            self._hold_back(self._decode(ids))
        return self.stopped

    def take(self) -> str:
        """The new text since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        """The text that was held back; call it after the last id."""
        if not self.stopped:
            self._hold_back(self._new_text())
            self._ready, self._pending = self._ready + self._pending, ""
        return self.take()

    def _decode(self, ids: Sequence[int]) -> str:
        """The new text, if it ends with a complete character, or with more invalid bytes than a character has."""
        self._ids += ids
        new, num_held = self._new_text(), 0
        if not new:  # ids without a text
            del self._ids[self._num_shown : -_MAX_PENDING]
            return ""
        num_pending = len(self._ids) - self._num_shown
        if new.endswith(_REPLACEMENT):  # perhaps the first bytes of a character
            if num_pending < _MAX_PENDING:
                return ""
            # A character has at most three more bytes, so that one of these places is between two characters.
            num_held = next((held for held in range(3, 7) if new.startswith(self._new_text(held))), 3)
            new = self._new_text(num_held)
        # The next ids are decoded together with these: decoding may depend on the ids before.
        self._ids, self._num_shown = self._ids[self._num_shown :], num_pending - num_held
        return new

    def _new_text(self, num_held: int = 0) -> str:
        """The text of the ids that were not returned, without the last `num_held`."""
        ids = self._ids[: len(self._ids) - num_held]
        return self.tokenizer.decode(ids)[len(self.tokenizer.decode(ids[: self._num_shown])) :]

    def _hold_back(self, new: str) -> None:
        text = self._pending + new
        matches = [start for stop in self.stop_strings if (start := text.find(stop)) >= 0]
        if matches:
            self._ready, self._pending, self.stopped = self._ready + text[: min(matches)], "", True
            return
        num_pending = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        self._ready, self._pending = self._ready + text[: len(text) - num_pending], text[len(text) - num_pending :]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)


class SpanDelta(NamedTuple):
    """New text of a span of a turn. number: counts spans from 0. closed: its end mark was generated."""

    kind: Kind
    number: int
    text: str
    closed: bool = False


class TurnStream:
    """Ids in; reasoning, content and tool calls out, as a stream.

    The deltas joined are what `turn_parser.parse` returns for the full turn: the reasoning and content of its message,
    and the text of each call. thinking: as for `parse`. A stop string must lie between two marks.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None = None, stop_strings: Sequence[str] = ()) -> None:
        self._marks = {tokenizer.control(mark): mark for mark in tokens.VISIBLE_TOKENS if tokenizer.has(mark)}
        self._text_marks = [mark for mark in tokens.VISIBLE_TOKENS if not tokenizer.has(mark)]  # found in the text
        self._tokenizer, self._stop_strings, self._stop = tokenizer, stop_strings, tokenizer.stop
        self._plain = TextStream(tokenizer, stop_strings)  # since the last mark
        self._partial_mark = ""  # text that may become a mark
        self._turn = _TurnState(thinking)
        self.reasoning_tokens = 0  # without marks
        self.stopped = False

    def extend(self, ids: Sequence[int]) -> bool:
        """Add ids: the text between two marks is decoded at once. Returns whether a stop string is complete. `take`
        returns the deltas."""
        plain: list[int] = []
        for token_id in ids:
            if token_id in self._marks:
                self._add_plain(plain)
                self._add_mark(token_id)
                plain = []
            elif token_id not in self._stop:
                plain.append(token_id)
                if self._text_marks:  # one by one, to know which are reasoning
                    self._add_plain(plain)
                    plain = []
        self._add_plain(plain)
        return self.stopped

    def _add_plain(self, ids: Sequence[int]) -> None:
        if ids and not self.stopped:
            self.reasoning_tokens += len(ids) if self._turn.kind == "reasoning" else 0
            self.stopped = self._plain.extend(ids)
            self._text(self._plain.take(), is_last=self.stopped)

    def _add_mark(self, token_id: int) -> None:
        if not self.stopped:
            self._text(self._plain.finish(), is_last=True)
            self._plain = TextStream(self._tokenizer, self._stop_strings)
            self._turn.mark(self._marks[token_id])

    def take(self) -> list[SpanDelta]:
        """The deltas since the last call."""
        deltas, self._turn.deltas = self._turn.deltas, []
        return deltas

    def finish(self) -> list[SpanDelta]:
        """The deltas that were held back; call it after the last id."""
        self._text(self._plain.finish(), is_last=True)
        self._turn.finish()
        return self.take()

    def _text(self, text: str, *, is_last: bool) -> None:
        text = self._partial_mark + text
        while matches := [(text.index(mark), mark) for mark in self._text_marks if mark in text]:
            start, mark = min(matches)
            self._turn.text(text[:start])
            self._turn.mark(mark)
            text = text[start + len(mark) :]
        num_pending = 0 if is_last else max((_overlap(text, mark) for mark in self._text_marks), default=0)
        self._partial_mark = text[len(text) - num_pending :]
        self._turn.text(text[: len(text) - num_pending])


class _TurnState:
    """Marks and text in, deltas out: `turn_parser` as a stream. Text that the parser may drop is held back: whitespace
    around reasoning, whitespace and stray marks before content, a newline before a call."""

    def __init__(self, thinking: bool | None) -> None:
        self.deltas: list[SpanDelta] = []
        self.kind: Kind = "reasoning" if thinking else "content"
        self._number = 0
        self._may_think = thinking is None
        self._after_call = False
        self._has_text = self._has_stray_marks = False  # of this span
        self._has_content = self._has_reasoning = False  # of this turn
        self._pending = ""

    def mark(self, mark: str) -> None:
        if self.kind == "reasoning" and mark == tokens.END_THINK:
            self._start_span("content")
        elif self.kind == "reasoning" and mark == tokens.THINK and not self._has_text:
            pass  # the prompt opened the reasoning, and the model opens it again
        elif self.kind == "content" and mark == tokens.THINK and self._may_think:
            self.kind, self._pending, self._may_think = "reasoning", "", False
        elif self.kind != "reasoning" and mark == tokens.TOOL_CALL:
            self._start_span("tool_call")
        elif self.kind == "tool_call" and mark == tokens.END_TOOL_CALL:
            self._start_span("content")
        elif self.kind == "content":  # a stray mark
            self._has_stray_marks, self._may_think = True, False
            self._add_content(self._pending + mark)
        else:
            self.text(mark)

    def text(self, text: str) -> None:
        if not text:
            return
        self._has_text = self._has_text or bool(text.strip())
        if self.kind == "tool_call":
            self._emit(text)
        elif self.kind == "reasoning":
            self._add_reasoning(self._pending + text)
        else:
            self._add_content(self._pending + text)
        self._may_think = self._may_think and not self._has_text

    def _add_reasoning(self, text: str) -> None:
        if not self._has_text:
            return
        stripped = text.rstrip()
        self._emit(stripped if self._has_reasoning else stripped.lstrip())
        self._has_reasoning, self._pending = True, text[len(stripped) :]

    def _add_content(self, text: str) -> None:
        if not self._has_text:
            self._pending = text
            return
        if self._after_call:
            text = text.removeprefix("\n")
            text = "\n" + text if self._has_content else text
            self._after_call = False
        if not self._has_content:
            text = text.lstrip("\n")
        self._pending = "\n" if text.endswith("\n") else ""
        self._emit(text.removesuffix("\n"))

    def _end_content(self, pending: str) -> None:
        """Emit text held back at the end of content; drop it if the span has only stray marks or follows a call."""
        if self._has_text or not (self._has_stray_marks or self._after_call):
            self._emit(pending if self._has_content else pending.lstrip("\n"))

    def _emit(self, text: str, *, closed: bool = False) -> None:
        if text or closed:
            self.deltas.append(SpanDelta(self.kind, self._number, text, closed))
        if self.kind == "content":
            self._has_content = self._has_content or bool(text)

    def _start_span(self, kind: Kind) -> None:
        was_call = self.kind == "tool_call"
        if self.kind == "content":
            self._end_content(self._pending.removesuffix("\n"))
        elif not (was_call and kind == "tool_call"):
            self._emit("", closed=True)
        self.kind, self._number, self._pending = kind, self._number + 1, ""
        self._has_text = self._has_stray_marks = self._may_think = False
        self._after_call = was_call and kind == "content"

    def finish(self) -> None:
        if self.kind == "content":
            self._end_content(self._pending)
        self._pending = ""
