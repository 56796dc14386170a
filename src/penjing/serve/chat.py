"""POST /v1/chat/completions: an answer in a conversation, with thoughts, tool calls, and JSON by schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL, Tokenizer
from penjing.infer.grammar import ANY_OBJECT, JsonMask, call_schema
from penjing.infer.requests import Event
from penjing.infer.text_stream import TurnStream
from penjing.serve.answers import finish_of
from penjing.serve.deltas import Delta, TurnDeltas, merged, message_of
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.generation import Service, Target, Work
from penjing.serve.hub import Job
from penjing.serve.schema import ChatMessage, ChatRequest

ROLES = {"developer": "system"}  # as OpenAI calls it since 2024


@dataclass(frozen=True)
class Turn:
    """The turn that is to be written. lead: its first tokens, which are given. close: where it is the inside of a call,
    the tokens that end it."""

    prompt: list[int]
    lead: list[int]
    close: list[int]
    thinking: bool | None
    grammar: Callable[[], JsonMask] | None


class ChatChoice:
    """One answer. Its log-probabilities go out with the text of their tokens."""

    def __init__(self, index: int, turn: Turn, body: ChatRequest, target: Target) -> None:
        self.index, self.turn, self.finish = index, turn, None
        tokenizer = target.served.tokenizer
        self.stop, self.texts = tokenizer.stop, target.service.token_texts(target.served)
        self.top = (body.top_logprobs or 0) if body.logprobs else None
        self.stream = TurnStream(tokenizer, turn.thinking, body.stop_texts)
        self.deltas = TurnDeltas()
        for index in turn.lead:  # one by one: at once, half a character at the end would hold back all of it
            self.stream.append(index)
        if not turn.close:
            self.deltas.add(self.stream.take())  # the client has it

    finish: str | None

    def take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        tokens = [event.token for event in events if event.token is not None and event.token.id not in self.stop]
        self.stream.extend([token.id for token in tokens])
        scores = [] if self.top is None else [self.texts.entry(token, self.top) for token in tokens]
        self.finish = finish_of(events[-1])
        end = {}  # for the chat page: the token that ended the answer, which is no part of its text
        for event in events:
            if self.top is not None and event.token is not None and event.token.id in self.stop:
                end = {"end": self.texts.entry(event.token, self.top)}
        found = self._deltas()
        if not found and (scores or self.finish):
            found.append({})
        chunks = [{"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in found]
        if scores or end:
            chunks[0]["logprobs"] = {"content": scores, "refusal": None, **end}
        if self.finish:
            chunks[-1]["finish_reason"] = self.finish
        return chunks

    def _deltas(self) -> list[Delta]:
        if self.finish == "stop":
            self.stream.extend(self.turn.close)
        pieces = self.stream.finish() if self.finish else self.stream.take()
        found = merged(self.deltas.add(pieces, ended=self.finish is not None))
        if self.finish == "stop" and self.deltas.calls:
            self.finish = "tool_calls"
        return found

    @property
    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}


async def begin(service: Service, body: ChatRequest, job: Job) -> Work:
    """Hand a request to the engine. Raises ApiError if it is refused."""
    _check(body)
    return await _begin(Target.of(service, body, job), body)


async def _begin(target: Target, body: ChatRequest) -> Work:
    if not target.answers:
        raise ApiError(
            400, "model: was only pretrained and continues texts: use /v1/completions", param="model", code="no_chat"
        )
    messages = [_message(message, number) for number, message in enumerate(body.messages)]
    characters = sum(len(message.content) + len(message.reasoning_content) for message in messages)
    turn = await target.prepare(lambda: _turn(target, body, messages), [characters], "messages")
    request = target.request(
        body,
        [*turn.prompt, *turn.lead],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        param="messages",
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        grammar=turn.grammar,
    )
    choices = [ChatChoice(index, turn, body, target) for index in range(body.n or 1)]
    return Work(target, body.model, "chatcmpl", [request], choices)


async def whole(work: Work) -> dict[str, Any]:
    """The answer in one piece."""
    choices = []
    for index, chunks in enumerate(await work.whole()):
        scores = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        message = message_of([chunk["delta"] for chunk in chunks])
        logprobs = {"content": scores, "refusal": None} if scores else None
        finish = work.choices[index].finish
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    return {**work.head("chat.completion"), "choices": choices, "usage": work.tally.usage, "penjing": work.tally.timing}


def _check(body: ChatRequest) -> None:
    """Fields that do not go together. Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", param="top_logprobs")
    if body.has_to_call and not body.tools:
        raise ApiError(400, "tool_choice: only with tools", param="tool_choice")
    wants_json = body.response_format is not None and body.response_format.type != "text"
    if wants_json and body.response_format and body.response_format.type == "json_schema":
        named = body.response_format.json_schema
        if named is None or named.json_schema is None:
            raise ApiError(400, "response_format: json_schema needs a schema", param="response_format")
    forced = body.has_to_call
    if forced and wants_json:
        raise ApiError(400, "response_format: not where a tool has to be called", param="response_format")
    if (forced or wants_json) and body.enable_thinking:
        raise ApiError(400, "enable_thinking: not where the answer has a fixed form", param="enable_thinking")
    if (forced or wants_json) and body.continue_ids:
        raise ApiError(400, "continue_ids: not where the answer has a fixed form", param="continue_ids")


def _message(message: ChatMessage, number: int) -> Message:
    """A message as templates know it. Raises ApiError for a call whose arguments are no JSON object."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    calls = []
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = ""
        if not isinstance(arguments, dict):
            param = f"messages[{number}].tool_calls"
            raise ApiError(400, f"{param}: arguments are not a JSON object", param=param)
        calls.append({"name": call.function.name, "arguments": arguments})
    return Message(
        role=ROLES.get(message.role, message.role),
        content=text,
        reasoning_content=message.reasoning_content or "",
        tool_calls=tuple(calls),
    )


def _turn(target: Target, body: ChatRequest, messages: Sequence[Message]) -> Turn:
    """The prompt in the form of the model's template, and what the answer is bound to."""
    tokenizer = target.served.tokenizer
    offered = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    functions = [function.model_dump(exclude_none=True) for function in offered]
    lead, close, grammar = target.lead(body), list[int](), None
    if body.has_to_call:
        lead, close = _mark(tokenizer, TOOL_CALL, after="\n"), _mark(tokenizer, END_TOOL_CALL)
        grammar = _grammar(target, call_schema(_allowed(body, functions)), "tools")
    elif body.response_format is not None and body.response_format.type != "text":
        named = body.response_format.json_schema
        schema = named.json_schema if named is not None and body.response_format.type == "json_schema" else None
        grammar = _grammar(target, ANY_OBJECT if schema is None else schema, "response_format")
    prompt = render(tokenizer, messages, functions, ask=True, thinking=body.enable_thinking).ids
    return Turn(prompt, lead, close, body.enable_thinking, grammar)


def _grammar(target: Target, schema: Mapping[str, Any], param: str) -> Callable[[], JsonMask]:
    try:
        return target.served.grammars.for_schema(schema)
    except UserError as error:
        raise from_user_error(error, param) from None


def _mark(tokenizer: Tokenizer, mark: str, after: str = "") -> list[int]:
    """The ids of a mark around a call, as `render` writes it."""
    if tokenizer.has(mark):
        return [tokenizer.control(mark), *tokenizer.encode(after)]
    return tokenizer.encode(mark + after)


def _allowed(body: ChatRequest, functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    name = body.tool_to_call
    if name is None:
        return functions
    found = [function for function in functions if function["name"] == name]
    if not found:
        raise ApiError(400, "tool_choice: no such tool is offered", param="tool_choice")
    return found
