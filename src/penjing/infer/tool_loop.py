"""Between two turns of the model: run the tools it called and inject their results."""

from collections.abc import Sequence
from dataclasses import dataclass

from penjing.agent_tools.box import Result, Toolbox
from penjing.data.chat.render import after_calls
from penjing.data.chat.turn_parser import ParsedTurn, parse
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.requests import Completion, InjectedTokens, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolExchange:
    """One turn of the model, and the results of its calls. Calls of a last turn are not run."""

    turn: ParsedTurn
    results: tuple[Result, ...] = ()


class ToolLoop:
    """The `OnTurnEnd` callback for tools: injects the results and the opening of the next turn. max_turns: of the model
    in one answer; calls in the last one are not run. thinking: as given to `render`."""

    def __init__(self, tokenizer: Tokenizer, toolbox: Toolbox, *, max_turns: int, thinking: bool | None = None) -> None:
        self.tokenizer, self.toolbox, self.max_turns, self.thinking = tokenizer, toolbox, max_turns, thinking

    def __call__(self, turns: Sequence[Turn]) -> list[InjectedTokens | None]:
        return [self.next_input(turn.ids) if turn.number < self.max_turns else None for turn in turns]

    def next_input(self, ids: Sequence[int]) -> InjectedTokens | None:
        """The tokens to inject after a turn; None if it has no calls. The note is its `ToolExchange`."""
        turn = self.parse_turn(ids)
        if not turn.calls:
            return None
        results = self.toolbox.run(turn.calls)
        texts = [result.text for result in results]
        injected_ids = after_calls(self.tokenizer, turn.as_called, texts, thinking=self.thinking)
        return InjectedTokens(injected_ids, ToolExchange(turn=turn, results=results))

    def exchanges(self, completion: Completion) -> tuple[ToolExchange, ...]:
        return (*completion.notes, ToolExchange(turn=self.parse_turn(last_turn(completion))))

    def parse_turn(self, ids: Sequence[int]) -> ParsedTurn:
        return parse(self.tokenizer, ids, thinking=self.thinking)


def last_turn(answer: Completion) -> list[int]:
    """The ids that the model sampled after the last injected ones."""
    if answer.is_sampled is None:
        return answer.ids
    mask = answer.is_sampled
    start = len(mask) - mask[::-1].index(False) if False in mask else 0
    return answer.ids[start:]
