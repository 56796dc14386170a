"""POST /v1/chat/completions: an answer in a conversation, with reasoning, tool calls, and JSON by schema."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import Message
from penjing.data.tokenizer.tokenizer import END_TOOL_CALL, TOOL_CALL, Tokenizer
from penjing.infer.grammar import JsonMask, call_schema
from penjing.infer.requests import Event
from penjing.infer.text_stream import TurnStream
from penjing.serve.deltas import Delta, TurnDeltas, merged, message_of
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.generation import PendingResponse, Service, Target
from penjing.serve.hub import Job
from penjing.serve.limits import MAX_VALUES
from penjing.serve.request_body import has_more_values
from penjing.serve.response_fields import finish_reason_of
from penjing.serve.schema import ChatMessage, ChatRequest


@dataclass(frozen=True)
class Turn:
    """The turn to generate. prefix_ids: its first tokens, which are fixed. suffix_ids: the tokens that close a forced
    tool call."""

    prompt: list[int]
    prefix_ids: list[int]
    suffix_ids: list[int]
    thinking: bool | None
    grammar: Callable[[], JsonMask] | None


class ChatChoice:
    """One answer. Log-probabilities are sent with the text of their tokens."""

    def __init__(self, index: int, turn: Turn, body: ChatRequest, target: Target) -> None:
        self.index, self.turn = index, turn
        self.finish: str | None = None
        tokenizer = target.served.tokenizer
        self.stop, self.texts = tokenizer.stop, target.service.token_texts(target.served)
        self.num_top = (body.top_logprobs or 0) if body.logprobs else None
        self.stream = TurnStream(tokenizer, turn.thinking, body.stop_texts)
        max_calls = 1 if body.parallel_tool_calls is False else None
        self.deltas = TurnDeltas(is_forced=bool(turn.suffix_ids), max_calls=max_calls)
        for index in turn.prefix_ids:  # one by one: together, half a character at the end would hold back all of them
            self.stream.extend([index])
        self.stream.reasoning_tokens = 0
        if not turn.suffix_ids:
            self.deltas.add(self.stream.take())  # the client has this text

    def take(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        tokens = [event.token for event in events if event.token is not None and event.token.id not in self.stop]
        self.stream.extend([token.id for token in tokens])
        scores = [] if self.num_top is None else [self.texts.entry(token, self.num_top) for token in tokens]
        self.finish = finish_reason_of(events[-1])
        end = {}  # for the chat page: the stop token, which is not in the text
        last = events[-1].token
        if self.num_top is not None and last is not None and last.id in self.stop:
            end = {"end": self.texts.entry(last, self.num_top)}
        deltas = self._deltas()
        if self.finish or (scores and not deltas):
            deltas.append({})
        chunks = [{"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if scores or end:
            chunks[0]["logprobs"] = {"content": scores, "refusal": None, **end}
        if self.finish:
            chunks[-1]["finish_reason"] = self.finish
        return chunks

    def _deltas(self) -> list[Delta]:
        if self.finish == "stop":
            self.stream.extend(self.turn.suffix_ids)
        pieces = self.stream.finish() if self.finish else self.stream.take()
        deltas = merged(self.deltas.add(pieces, ended=self.finish is not None))
        if self.finish == "stop" and self.deltas.calls:
            self.finish = "tool_calls"
        return deltas

    @property
    def reasoning_tokens(self) -> int:
        return self.stream.reasoning_tokens

    @property
    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}


async def start(service: Service, body: ChatRequest, job: Job) -> PendingResponse:
    """Submit a request to the engine. Raises ApiError if it is invalid."""
    target = Target.of(service, body, job)
    if not target.served.is_chat(target.adapter):
        raise ApiError(
            400, "model: was only pretrained and continues texts: use /v1/completions", param="model", code="no_chat"
        )
    turn = await encode(target, body)
    request = target.request(
        body,
        [*turn.prompt, *turn.prefix_ids],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        param="messages",
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        grammar=turn.grammar,
    )
    choices = [ChatChoice(index, turn, body, target) for index in range(body.n or 1)]
    return PendingResponse(target, body, "chatcmpl", [request], choices)


async def encode(target: Target, body: ChatRequest) -> Turn:
    """The turn to generate. Raises ApiError if a field is invalid, or the messages are too long."""
    _check_fields(body)
    all_text = body.model_dump_json(include={"messages", "tools"}, exclude_none=True)
    has_grammar = body.requires_tool_call or body.answer_schema is not None
    return await target.encode(lambda: _turn(target, body), [len(all_text)], "messages", has_grammar=has_grammar)


async def collect(work: PendingResponse) -> dict[str, Any]:
    choices = []
    for index, chunks in enumerate(await work.collect()):
        scores = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        message = message_of([chunk["delta"] for chunk in chunks])
        logprobs = {"content": scores, "refusal": None} if scores else None
        finish = work.choices[index].finish
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    return {**work.meta("chat.completion"), "choices": choices, "usage": work.usage, "penjing": work.stats.timing}


def _check_fields(body: ChatRequest) -> None:
    """Raises ApiError for fields that exclude each other."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs", param="top_logprobs")
    if body.functions:
        raise ApiError(400, "functions: this form of 2023 is not served: use tools", param="functions")
    if (body.requires_tool_call or body.allowed_tools) and not body.tools:
        raise ApiError(400, "tool_choice: only with tools", param="tool_choice")
    for name, value in (("enable_thinking", body.thinking), ("continue_ids", body.continue_ids)):
        if value and (body.answer_schema is not None or body.requires_tool_call):
            raise ApiError(400, f"{name}: not with a required tool call or JSON", param=name)


def _arguments(sent: str | dict[str, Any] | None) -> Any:
    """The arguments of a past call: an object, or the text that a model wrote instead of one. A text of too many values
    stays one as well: no other thread runs while they are built."""
    if isinstance(sent, str) and sent.strip():
        with contextlib.suppress(ValueError, RecursionError):
            if not has_more_values(sent.encode(), MAX_VALUES) and isinstance(parsed := json.loads(sent), dict):
                return parsed
        return sent
    return sent if isinstance(sent, dict) else {}


def _message(message: ChatMessage) -> Message:
    content = message.content or message.refusal
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    calls = []
    for call in message.tool_calls or ():
        arguments = _arguments(call.function.arguments)
        json.dumps(arguments, ensure_ascii=False).encode()  # raises for half a character, as \ud800
        calls.append({"name": call.function.name, "arguments": arguments})
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=text,
        reasoning_content=message.reasoning_content or "",
        tool_calls=tuple(calls),
    )


def _turn(target: Target, body: ChatRequest) -> Turn:
    """The prompt in the model's chat template, and the constraints on the answer."""
    messages = [_message(message) for message in body.messages]
    tokenizer = target.served.tokenizer
    functions = _offered_functions(body)
    prefix_ids, suffix_ids, grammar = target.prefix_ids(body), list[int](), None
    if body.requires_tool_call:
        prefix_ids, suffix_ids = _mark_ids(tokenizer, TOOL_CALL, after="\n"), _mark_ids(tokenizer, END_TOOL_CALL)
        callable_functions = _named(functions, body.required_tool and [body.required_tool])
        grammar = _grammar(target, call_schema(callable_functions), "tools")
    elif body.answer_schema is not None:
        grammar = _grammar(target, body.answer_schema, "response_format")
    prompt = render(tokenizer, messages, functions, ask=True, thinking=body.thinking).ids
    return Turn(prompt, prefix_ids, suffix_ids, body.thinking, grammar)


def _grammar(target: Target, schema: Mapping[str, Any], param: str) -> Callable[[], JsonMask]:
    try:
        return target.served.grammars.for_schema(schema)
    except UserError as error:
        raise from_user_error(error, param) from None


def _mark_ids(tokenizer: Tokenizer, mark: str, after: str = "") -> list[int]:
    """The ids of a mark around a call, as `render` writes it."""
    if tokenizer.has(mark):
        return [tokenizer.control(mark), *tokenizer.encode(after)]
    return tokenizer.encode(mark + after)


def _offered_functions(body: ChatRequest) -> list[dict[str, Any]]:
    """What the prompt lists. Tools that are not allowed are left out, since nothing else keeps a model from calling
    them."""
    offered = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    return _named(offered, body.allowed_tools)


def _named(functions: list[dict[str, Any]], names: Sequence[str] | None) -> list[dict[str, Any]]:
    """The functions of these names; all if there are none. Raises ApiError if one is missing."""
    if names is None:
        return functions
    if not {function["name"] for function in functions}.issuperset(names):
        raise ApiError(400, "tool_choice: no such tool is offered", param="tool_choice")
    return [function for function in functions if function["name"] in names]
