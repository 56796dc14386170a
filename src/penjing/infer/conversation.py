"""A conversation with a model: what was said, and the next answer, piece by piece.

Keys and values of what was read stay in the engine's slot, so that a turn reads only what is new. A model that was only
pretrained goes on from each text alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from penjing.agent_tools.box import Result, Toolbox
from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import Message, chat_record
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.infer.engine import Engine
from penjing.infer.requests import Ended, Request
from penjing.infer.sample import Sampling
from penjing.infer.text_stream import Piece, TextStream, TurnStream
from penjing.infer.tool_loop import ToolExchange, ToolLoop

MOST_TURNS = 8  # of the model in one answer
MIN_ANSWER_TOKENS = 64  # tokens for an answer, for which the oldest exchanges are dropped


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How answers are generated. thinking: see data/chat/render.py. max_tokens: of one turn."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 200
    seed: int = 0
    thinking: bool | None = None
    toolbox: Toolbox = field(default_factory=lambda: Toolbox(()))
    adapter: str | None = None  # as of infer/requests.py


@dataclass(frozen=True, slots=True)
class Written:
    """What is new of a turn."""

    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """A turn is over. shared: tokens of the prompt that were not read again. Seconds count from the request on."""

    tokens: int
    prompt_tokens: int
    shared: int
    first_token_seconds: float
    tokens_per_second: float  # after the first token; 0 where there is no second
    ended: Ended


Part = Written | TurnEnd | Result


class Conversation:
    """messages: what was said so far. answers: whether the model learned from conversations. context_tokens: that it
    has learned to read together; where they are used up, the oldest exchanges are dropped."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: GenerationOptions = GenerationOptions(),
        *,
        answers: bool = True,
        context_tokens: int,
    ) -> None:
        self.engine, self.tokenizer, self.options = engine, tokenizer, options
        self.answers, self.context_tokens = answers, context_tokens
        self.system = ""
        self.messages: list[Message] = []
        self._retries = 0
        self._is_stopped = False

    def ask(self, text: str) -> Iterator[Part]:
        """The answer to `text`. Raises UserError, and remembers nothing, where there is no space for one."""
        self._retries = 0
        return self._answer([*self.messages, Message(role="user", content=text)])

    def retry(self) -> Iterator[Part]:
        """Another answer to the last question, drawn with the next seed. Raises UserError if there was none."""
        asked = [number for number, message in enumerate(self.messages) if message.role == "user"]
        if not asked:
            raise UserError("nothing was asked yet")
        self._retries += 1
        return self._answer(self.messages[: asked[-1] + 1])

    def stop(self) -> None:
        """End the answer that is being written after its next token; it is kept. For handlers of signals."""
        self._is_stopped = True

    def clear(self) -> None:
        """Forget what was said. The system prompt stays."""
        self.messages = []

    def record(self) -> dict[str, Any]:
        """The conversation in the form that conversations are trained on. Raises UserError if it cannot be."""
        if not self.answers:
            raise UserError("the model was only pretrained: there is no conversation")
        answers = [message for message in self.messages if message.role == "assistant"]
        if not answers:
            raise UserError("nothing was answered yet")
        if any(not message.tool_calls and not message.content.strip() for message in answers):
            raise UserError("an answer is empty, and nothing can be learned from it", next_step="Ask again.")
        # A weak model writes zero bytes too, which readers of conversations reject.
        said = [replace(each, content=each.content.replace("\0", "\ufffd")) for each in self.messages]
        return chat_record(self._with_system(said), self.options.toolbox.schemas)

    # --- an answer ---------------------------------------------------------------------------------------------------

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        return [*([Message(role="system", content=self.system)] if self.system else []), *messages]

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        if not self.answers:
            return [self.tokenizer.begin, *self.tokenizer.encode(messages[-1].content)]
        options = self.options
        shown = self._with_system(messages)
        return render(self.tokenizer, shown, options.toolbox.schemas, ask=True, thinking=options.thinking).ids

    def _fit(self, messages: list[Message]) -> list[Message]:
        """Without the oldest exchanges where the conversation leaves too few tokens for an answer."""
        limit = self.context_tokens - min(self.options.max_tokens, MIN_ANSWER_TOKENS)
        while len(messages) > 2 and len(self._prompt(messages)) > limit:
            following = next((at for at in range(1, len(messages)) if messages[at].role == "user"), len(messages) - 1)
            messages = messages[following:]
        return messages

    def _answer(self, asked: list[Message]) -> Iterator[Part]:
        """The turns of one answer, with the results of the tools that it calls."""
        self._is_stopped = False
        asked = self._fit(asked)
        ids, toolbox = self._prompt(asked), self.options.toolbox
        turns = ToolLoop(self.tokenizer, toolbox, max_turns=MOST_TURNS, thinking=self.options.thinking)
        said = list(asked)
        for number in range(1, MOST_TURNS + 1):
            written: list[int] = []
            ended = yield from self._turn(ids, written)
            if ended == "cancelled" and not written:
                break
            if not self.answers:
                said.append(Message(role="assistant", content=self.tokenizer.decode(written)))
                break
            given = turns.after(written) if toolbox and ended == "stop" else None
            exchange = given.note if given is not None else ToolExchange(said=turns.parsed(written))
            said.append(exchange.said.message)
            said += [Message(role="tool", content=result.text) for result in exchange.results]
            yield from exchange.results
            is_answered = all(result.is_answer for result in exchange.results)
            if given is None or is_answered or self._is_stopped or number == MOST_TURNS:
                break
            ids = [*ids, *written, self.tokenizer.message_end, *given.ids]
            if len(ids) >= self.engine.max_tokens:
                break
        if len(said) > len(asked):
            self.messages = said

    def _turn(self, ids: Sequence[int], written: list[int]) -> Generator[Part, None, Ended]:
        """Write one turn; `written` gets its ids without the stop token. Returns how it ended."""
        engine, options, tokenizer = self.engine, self.options, self.tokenizer
        request = Request(
            prompt=ids,
            seeds=(options.seed + self._retries,),
            max_new_tokens=options.max_tokens,
            stop=tokenizer.stop,
            sampling=options.sampling,
            adapter=options.adapter,
        )
        began = time.perf_counter()
        ticket = engine.submit(request)
        stream: TurnStream | _Continuation
        stream = TurnStream(tokenizer, options.thinking) if self.answers else _Continuation(tokenizer)
        first = last = 0.0
        shared, ended = 0, cast(Ended, "")
        try:
            while not ended:
                if self._is_stopped:
                    engine.cancel(ticket)
                for event in engine.step():
                    if event.error is not None:
                        raise event.error
                    ended = event.ended
                    shared = shared or event.shared
                    if event.token is not None and event.token.id not in tokenizer.stop:
                        written.append(event.token.id)
                        last = time.perf_counter() - began
                        first = first or last
                        yield Written(stream.add(event.token.id))
        except BaseException:  # also where nobody wants to hear the rest
            engine.cancel(ticket)
            engine.step()
            raise
        yield Written(stream.finish())
        yield TurnEnd(
            tokens=len(written),
            prompt_tokens=len(ids),
            shared=shared,
            first_token_seconds=first,
            tokens_per_second=(len(written) - 1) / (last - first) if last > first else 0.0,
            ended=ended,
        )
        return ended


class _Continuation:
    """`TurnStream` of a model that was only pretrained: all is words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)

    def add(self, index: int) -> list[Piece]:
        return [Piece("words", 0, self._stream.add(index))]

    def finish(self) -> list[Piece]:
        return [Piece("words", 0, self._stream.finish())]
