"""A conversation with a model: the messages so far, and the next answer as a stream.

The KV cache of the conversation stays in the engine's slot, so each turn prefills only the new tokens. A model that was
only pretrained continues each text by itself.
"""

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
from penjing.infer.requests import FinishReason, Request
from penjing.infer.sample import Sampling
from penjing.infer.text_stream import SpanDelta, TextStream, TurnStream
from penjing.infer.tool_loop import ToolExchange, ToolLoop

MAX_TURNS = 8  # of the model in one answer
MIN_ANSWER_TOKENS = 64  # kept free for an answer: the oldest exchanges are dropped


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How answers are generated. thinking: see data/chat/render.py. max_tokens: of one turn."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 200
    seed: int = 0
    thinking: bool | None = None
    toolbox: Toolbox = field(default_factory=lambda: Toolbox(()))
    adapter: str | None = None  # see `Request.adapter`


@dataclass(frozen=True, slots=True)
class TextDelta:
    spans: Sequence[SpanDelta]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """A turn has ended. cached_tokens: prompt tokens taken from the KV cache. Seconds count from the request."""

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    tokens_per_second: float  # after the first token; 0 if there was only one
    finish_reason: FinishReason


ChatEvent = TextDelta | TurnEnd | Result


class Conversation:
    """messages: the conversation so far. is_chat_model: the model was trained on conversations. context_tokens: the
    sequence length it was trained on; when it is used up, the oldest exchanges are dropped."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: GenerationOptions = GenerationOptions(),
        *,
        is_chat_model: bool = True,
        context_tokens: int,
    ) -> None:
        self.engine, self.tokenizer, self.options = engine, tokenizer, options
        self.is_chat_model, self.context_tokens = is_chat_model, min(context_tokens, engine.max_tokens)
        self.system = ""
        self.messages: list[Message] = []
        self._retries = 0
        self._is_stopped = False

    def ask(self, text: str) -> Iterator[ChatEvent]:
        """The answer to `text`. Raises UserError, and adds no message, if the context has no space for one."""
        self._retries = 0
        return self._answer([*self.messages, Message(role="user", content=text)])

    def retry(self) -> Iterator[ChatEvent]:
        """Another answer to the last question, sampled with the next seed. Raises UserError if there is none."""
        questions = [number for number, message in enumerate(self.messages) if message.role == "user"]
        if not questions:
            raise UserError("nothing was asked yet")
        self._retries += 1
        return self._answer(self.messages[: questions[-1] + 1])

    def stop(self) -> None:
        """Stop the running answer after its next token and keep it. Signal handlers may call this."""
        self._is_stopped = True

    def clear(self) -> None:
        """Remove all messages. The system prompt stays."""
        self.messages = []

    def record(self) -> dict[str, Any]:
        """The conversation as a training record. Raises UserError if it cannot be one."""
        if not self.is_chat_model:
            raise UserError("the model was only pretrained: there is no conversation")
        answers = [message for message in self.messages if message.role == "assistant"]
        if not answers:
            raise UserError("nothing was answered yet")
        if any(not message.tool_calls and not message.content.strip() for message in answers):
            raise UserError("an answer is empty, so the conversation is no training data", next_step="Ask again.")
        # A weak model may write zero bytes, which the reader of training data rejects.
        messages = [replace(message, content=message.content.replace("\0", "\ufffd")) for message in self.messages]
        return chat_record(self._with_system(messages), self.options.toolbox.schemas)

    # --- an answer ----------------------------------------------------------------------------------------------------

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        return [*([Message(role="system", content=self.system)] if self.system else []), *messages]

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        if not self.is_chat_model:
            return [self.tokenizer.begin, *self.tokenizer.encode(messages[-1].content)]
        options = self.options
        all_messages = self._with_system(messages)
        return render(self.tokenizer, all_messages, options.toolbox.schemas, ask=True, thinking=options.thinking).ids

    def _fit(self, messages: list[Message]) -> list[Message]:
        """Drop the oldest exchanges until an answer has enough tokens. Raises UserError if it never has."""
        limit = self.context_tokens - min(self.options.max_tokens, MIN_ANSWER_TOKENS, self.context_tokens // 2)
        while len(messages) > 2 and len(self._prompt(messages)) > limit:
            next_user = next((i for i in range(1, len(messages)) if messages[i].role == "user"), len(messages) - 1)
            messages = messages[next_user:]
        if (tokens := len(self._prompt(messages))) > limit:
            what = "too long for the model's context, with the system prompt and the tools"
            wanted = f"at most {limit}, so that {self.context_tokens - limit} are left for the answer"
            raise UserError(what, where="the question", got=f"{tokens} tokens", wanted=wanted)
        return messages

    def _answer(self, prompt_messages: list[Message]) -> Iterator[ChatEvent]:
        """The turns of one answer, and the results of the tools it calls."""
        self._is_stopped = False
        prompt_messages = self._fit(prompt_messages)
        ids, toolbox = self._prompt(prompt_messages), self.options.toolbox
        tool_loop = ToolLoop(self.tokenizer, toolbox, max_turns=MAX_TURNS, thinking=self.options.thinking)
        messages = list(prompt_messages)
        for number in range(1, MAX_TURNS + 1):
            generated_ids: list[int] = []
            finish_reason = yield from self._generate_turn(ids, generated_ids)
            if finish_reason == "cancelled" and not generated_ids:
                break
            if not self.is_chat_model:
                messages.append(Message(role="assistant", content=self.tokenizer.decode(generated_ids)))
                break
            injected = tool_loop.next_input(generated_ids) if toolbox and finish_reason == "stop" else None
            exchange = injected.note if injected is not None else ToolExchange(turn=tool_loop.parse_turn(generated_ids))
            messages.append(exchange.turn.message)
            messages += [Message(role="tool", content=result.text) for result in exchange.results]
            yield from exchange.results
            is_answered = all(result.is_answer for result in exchange.results)
            if injected is None or is_answered or self._is_stopped or number == MAX_TURNS:
                break
            ids = [*ids, *generated_ids, self.tokenizer.message_end, *injected.ids]
            if len(ids) >= self.context_tokens:
                break
        if len(messages) > len(prompt_messages):
            self.messages = messages

    def _generate_turn(self, ids: Sequence[int], generated_ids: list[int]) -> Generator[ChatEvent, None, FinishReason]:
        """Generate one turn; its ids without the stop token are appended to `generated_ids`."""
        engine, options, tokenizer = self.engine, self.options, self.tokenizer
        request = Request(
            prompt=ids,
            seeds=(options.seed + self._retries,),
            max_new_tokens=min(options.max_tokens, self.context_tokens - len(ids)),
            stop=tokenizer.stop,
            sampling=options.sampling,
            adapter=options.adapter,
        )
        started = time.perf_counter()
        request_id = engine.submit(request)
        stream: TurnStream | _Continuation
        stream = TurnStream(tokenizer, options.thinking) if self.is_chat_model else _Continuation(tokenizer)
        first_at = last_at = 0.0
        cached_tokens, finish_reason = 0, cast(FinishReason, "")
        try:
            while not finish_reason:
                if self._is_stopped:
                    engine.cancel(request_id)
                for event in engine.step():
                    if event.error is not None:
                        raise event.error
                    finish_reason = event.finish_reason
                    cached_tokens = cached_tokens or event.cached_tokens
                    if event.token is not None and event.token.id not in tokenizer.stop:
                        generated_ids.append(event.token.id)
                        last_at = time.perf_counter() - started
                        first_at = first_at or last_at
                        stream.extend([event.token.id])
                        yield TextDelta(stream.take())
        except BaseException:  # also when the caller closes the generator
            engine.cancel(request_id)
            engine.step()
            raise
        yield TextDelta(stream.finish())
        yield TurnEnd(
            tokens=len(generated_ids),
            prompt_tokens=len(ids),
            cached_tokens=cached_tokens,
            first_token_seconds=first_at,
            tokens_per_second=(len(generated_ids) - 1) / (last_at - first_at) if last_at > first_at else 0.0,
            finish_reason=finish_reason,
        )
        return finish_reason


class _Continuation:
    """`TurnStream` of a model that was only pretrained: all text is content."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = TextStream(tokenizer)

    def extend(self, ids: Sequence[int]) -> None:
        self._stream.extend(ids)

    def take(self) -> list[SpanDelta]:
        return [SpanDelta("content", 0, self._stream.take())]

    def finish(self) -> list[SpanDelta]:
        return [SpanDelta("content", 0, self._stream.finish())]
