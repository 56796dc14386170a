"""OpenAI's contract where clients rely on it: whole answers, ends of streams, forced calls, errors."""

import asyncio
import enum
import json

import openai
import pytest
from pydantic import BaseModel
from sse import events

import penjing
from penjing.data.tokenizer.tokenizer import VISIBLE_TOKENS
from penjing.serve import app
from penjing.serve.guard import ADMITTED

TEXT = {"model": "base", "prompt": "so it is"}
QUESTION = {"model": "chat", "messages": [{"role": "user", "content": "so it is"}]}
KINDS = [{"temperature": 0}, {"n": 4}, {"echo": True}]


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "n=4", "echo"])
def test_an_answer_is_whole_also_where_its_first_token_comes_early(serving, tokenizer, kind, monkeypatch):
    collect = app.run_unless_disconnected

    async def collect_late(request, awaitable):
        while not request.scope[ADMITTED][0].first_token_at:
            await asyncio.sleep(0)
        return await collect(request, awaitable)

    monkeypatch.setattr(app, "run_unless_disconnected", collect_late)
    bias = {str(index): -100 for index in tokenizer.stop}
    answer = serving.http.post("/v1/completions", json={**TEXT, **kind, "max_tokens": 60, "logit_bias": bias}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * kind.get("n", 1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "requests", [pytest.param(40, marks=pytest.mark.usual), pytest.param(3334, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "n=4", "echo"])
def test_no_completion_is_cut(serving, tokenizer, kind, requests, count):
    """Whenever the first token comes, the answer holds all others too."""
    bias = {str(index): -100 for index in tokenizer.stop}
    for number in range(requests):
        body = {**TEXT, **kind, "prompt": f"so it is {number}", "seed": number, "max_tokens": 8, "logit_bias": bias}
        answer = serving.http.post("/v1/completions", json={**body, "logprobs": 0}).json()
        assert answer["usage"]["completion_tokens"] == 8 * kind.get("n", 1)
        written = 8 + ("echo" in kind) * (answer["usage"]["prompt_tokens"] - 1)  # the first token begins the document
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "length" and len(choice["logprobs"]["tokens"]) == written
    count("requests", requests)


@pytest.fixture(scope="module")
def roomy(start, make_served):
    """A server with space for the schemas of tools."""
    with start(make_served("chat", context=2048), max_tokens=200) as running:
        yield running


class Color(enum.Enum):
    RED, BLUE = "red", "blue"


class Kite(BaseModel):
    color: Color


class Shop(BaseModel):
    kites: tuple[Kite, Kite]
    best: Kite | None


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("model", [Kite, Shop])
def test_a_forced_call_fits_a_pydantic_model(roomy, model, beside):
    """References into `$defs`; another tool has definitions of the same name."""

    class Color(enum.Enum):
        GREEN = "green"

    class Other(BaseModel):
        color: Color

    tools = [openai.pydantic_function_tool(each) for each in ([Other, model] if beside else [model])]
    choice = {"type": "function", "function": {"name": model.__name__}} if beside else "required"
    for seed in range(3):
        asked = {**QUESTION, "tools": tools, "tool_choice": choice, "seed": seed, "max_tokens": 200}
        (call,) = roomy.openai.chat.completions.parse(**asked).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, model)
        with roomy.openai.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(client):
    for parameters in ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {}, None):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        asked = {**QUESTION, "tools": [tool], "tool_choice": "required", "seed": 5, "max_tokens": 64}
        choice = client.chat.completions.create(**asked).choices[0]
        for call in choice.message.tool_calls or ():
            assert call.function.arguments.startswith("{")
        assert not choice.message.content


def calls_of(response):
    message = response["choices"][0]["message"]
    return [call["function"] for call in message.get("tool_calls", ())], message["content"]


def test_a_forced_call_that_is_cut_is_never_content(roomy):
    tools = [openai.pydantic_function_tool(model) for model in (Kite, Shop)]
    asked = {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "Shop"}}, "seed": 2}
    whole = roomy.chat(**asked, max_tokens=200).json()
    ((complete,), _), tokens = calls_of(whole), whole["usage"]["completion_tokens"]
    assert whole["choices"][0]["finish_reason"] == "tool_calls" and json.loads(complete["arguments"])
    partial = 0
    for limit in range(1, tokens + 1):
        response = roomy.chat(**asked, max_tokens=limit).json()
        calls, content = calls_of(response)
        assert not content
        assert response["choices"][0]["finish_reason"] == ("length" if limit < tokens else "tool_calls")
        for call in calls:
            assert call["name"] == "Shop" and complete["arguments"].startswith(call["arguments"])
            partial += call["arguments"] not in ("", complete["arguments"])
    assert partial > 5


def test_a_stop_string_inside_a_forced_call_is_no_complete_call(roomy):
    tool = openai.pydantic_function_tool(Kite)
    response = roomy.chat(tools=[tool], tool_choice="required", stop='color"', seed=1, max_tokens=64).json()
    ((call,), content) = calls_of(response)
    assert call == {"name": "Kite", "arguments": '{"'} and not content
    assert response["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_ends_with_an_empty_delta(serving, n):
    """Its text comes before. There is a chunk without choices only where the usage was asked for."""
    body = {**QUESTION, "stream": True, "n": n, "seed": 3, "max_tokens": 9}
    chunks = events(serving.http.post("/v1/chat/completions", json=body).text)
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert len(ends) == n and all(end["delta"] == {} for end in ends)
    assert chunks[-1]["choices"][0]["finish_reason"] and chunks[-1]["penjing"]["context"] == 256
    *rest, last = events(
        serving.http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}).text
    )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] <= 9 * n
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in rest)


def test_a_streamed_completion_has_a_choice_in_every_chunk(serving):
    chunks = events(serving.http.post("/v1/completions", json={**TEXT, "stream": True, "n": 2, "max_tokens": 9}).text)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks) and chunks[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 4])
def test_alternatives_of_a_completion_include_the_token(serving, tokenizer, top, stream):
    body = {**TEXT, "seed": 7, "max_tokens": 12, "logprobs": top, "echo": not stream, "temperature": 2}
    response = serving.http.post("/v1/completions", json={**body, "stream": stream})
    choices = [chunk["choices"][0]["logprobs"] for chunk in (events(response.text) if stream else [response.json()])]
    told = [
        each
        for scores in choices
        for each in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
    ]
    assert len(told) >= 12
    for token, logp, alternatives in told if stream else told[1:]:  # the first of an echo has none
        assert alternatives[token] == logp and top <= len(alternatives) <= top + 1
        assert len(alternatives) <= top or logp <= min(alternatives.values()) or not top


def test_the_first_token_of_a_prompt_of_ids_has_no_alternatives(serving):
    body = {"model": "base", "prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 0}
    scores = serving.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert scores["top_logprobs"][0] is scores["token_logprobs"][0] is None
    assert [len(each) for each in scores["top_logprobs"][1:]] == [1, 1]


def test_a_prompt_that_is_too_long_is_told_as_openai_does(serving):
    """Clients search the sentence."""
    for length in (300, 100_000):
        for path, body in (
            ("chat/completions", {**QUESTION, "messages": [{"role": "user", "content": "kites " * length}]}),
            ("completions", {**TEXT, "prompt": "kites " * length}),
        ):
            response = serving.http.post(f"/v1/{path}", json=body)
            error = response.json()["error"]
            assert response.status_code == 400 and error["code"] == "context_length_exceeded"
            assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")


def test_every_response_has_an_id_of_its_own(serving, client):
    responses = [
        serving.chat(), serving.chat(model="nobody"), serving.chat(n=0), serving.http.get("/health"),
        serving.http.get("/nothing"), serving.http.get("/v1/models", headers={"Host": "evil.example"}),
        serving.chat(stream=True), serving.http.get("/"),
    ]  # fmt: skip
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == len(ids)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**QUESTION, "model": "nobody"})
    assert missing.value.request_id and missing.value.type == "invalid_request_error"
    assert client.chat.completions.create(**QUESTION, max_tokens=1)._request_id


def test_history_as_clients_send_it(serving):
    """No arguments, and answers that refused."""
    for arguments in ("", " ", None, "{}"):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        past = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4"}]},
        ]
        assert serving.chat(messages=past).status_code == 200
    counts = []
    for said in (
        {"content": [{"type": "refusal", "refusal": "so no kites"}]},
        {"content": None, "refusal": "so no kites"},
        {"content": "so no kites"},
    ):
        past = [{"role": "user", "content": "a"}, {"role": "assistant", **said}, {"role": "user", "content": "b"}]
        counts.append(serving.chat(messages=past).json()["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_stream_options_need_a_stream(serving, path):
    body = {**QUESTION, **TEXT, "model": "chat" if path.startswith("chat") else "base", "max_tokens": 1}
    for options in ({}, {"include_usage": None}, {"include_usage": True}):
        response = serving.http.post(f"/v1/{path}", json={**body, "stream_options": options})
        assert response.status_code == 400 and response.json()["error"]["param"] == "stream_options"
        streamed = serving.http.post(f"/v1/{path}", json={**body, "stream_options": options, "stream": True})
        assert streamed.status_code == 200


class Place(BaseModel):
    kind: Color
    kites: int


def test_the_clients_helpers(client):
    """`stream` with a model to parse to, its events, and an answer that is cut."""
    asked = {**QUESTION, "response_format": Place, "seed": 4, "max_tokens": 64}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds and kinds.count("content.done") == 1
    assert isinstance(final.choices[0].message.parsed, Place)
    assert final.choices[0].message.parsed == client.chat.completions.parse(**asked).choices[0].message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**asked, "max_tokens": 2})
    with client.chat.completions.stream(**QUESTION, logprobs=True, n=2, seed=1, max_tokens=6) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("logprobs.content.done") == 2


def test_usage_counts_the_tokens_of_reasoning(serving, tokenizer):
    marks = {*tokenizer.stop, *(tokenizer.control(mark) for mark in VISIBLE_TOKENS)}
    for thinking, number in ((True, 8), (False, 0)):
        asked = {"enable_thinking": thinking, "logit_bias": {str(mark): -100 for mark in marks}, "seed": 1}
        usage = serving.chat(**asked).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": number}
        chunks = events(serving.chat(**asked, stream=True, stream_options={"include_usage": True}).text)
        assert chunks[-1]["usage"] == {**usage, "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]}


def test_every_answer_names_the_version_that_wrote_it(serving):
    whole = serving.chat().json()
    chunks = events(serving.chat(stream=True).text)
    assert {each["system_fingerprint"] for each in [whole, *chunks]} == {f"penjing-{penjing.__version__}"}
