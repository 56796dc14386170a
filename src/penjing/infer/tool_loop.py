"""Between two turns of a model: the tools it called are run, and it is given what they said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penjing.agent_tools.box import Result, Toolbox
from penjing.data.chat.render import after_calls
from penjing.data.chat.turn_parser import ParsedTurn, parse
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import Completion, InjectedTokens, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExchange:
    """One turn of the model, and what came of its calls; a last turn's calls are not run."""

    said: ParsedTurn
    results: tuple[Result, ...] = ()


class ToolLoop:
    """What follows turns that call tools (a `Follow` of infer/requests.py): results, and the next turn's
    opening.

    max_turns: of the model in one answer; calls in the last one stay unanswered. thinking: as `render` was told.
    """

    def __init__(self, tokenizer: Tokenizer, toolbox: Toolbox, *, max_turns: int, thinking: bool | None = None) -> None:
        self.tokenizer, self.toolbox, self.max_turns, self.thinking = tokenizer, toolbox, max_turns, thinking

    def __call__(self, turns: Sequence[Turn]) -> list[InjectedTokens | None]:
        return [self.after(turn.ids) if turn.number < self.max_turns else None for turn in turns]

    def after(self, ids: Sequence[int]) -> InjectedTokens | None:
        """What follows one turn; None if it called nothing. The note is its `ToolExchange`."""
        said = self.parsed(ids)
        if not said.calls:
            return None
        results = self.toolbox.run(said.calls)
        texts = [result.text for result in results]
        given = after_calls(self.tokenizer, said.as_called, texts, thinking=self.thinking)
        return InjectedTokens(given, ToolExchange(said=said, results=results))

    def exchanges(self, written: Completion) -> tuple[ToolExchange, ...]:
        """All turns of an answer."""
        return (*written.notes, ToolExchange(said=self.parsed(last_turn(written))))

    def parsed(self, ids: Sequence[int]) -> ParsedTurn:
        """One turn, taken apart."""
        return parse(self.tokenizer, ids, thinking=self.thinking)


def last_turn(written: Completion) -> list[int]:
    """The ids that the model said after the last it was given."""
    if written.said is None:
        return written.ids
    start = len(written.said) - written.said[::-1].index(False) if False in written.said else 0
    return written.ids[start:]
