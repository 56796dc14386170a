"""Tools by OpenAI's other forms: `allowed_tools`, one call at a time; and what is not served."""

import json

import pytest

from penjing.infer.text_stream import SpanDelta
from penjing.serve.deltas import TurnDeltas

QUESTION = {"role": "user", "content": "so it is"}


def described(name):
    parameters = {"type": "object", "properties": {"a": {"enum": [name]}}, "required": ["a"]}
    return {"name": name, "parameters": {**parameters, "additionalProperties": False}}


FUNCTIONS = [described("kite"), described("rain"), described("city")]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


def named(*names):
    return [{"type": "function", "function": {"name": name}} for name in names]


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named(*names)}}


def error(response, status=400):
    assert response.status_code == status, response.text
    return response.json()["error"]


@pytest.fixture(scope="module")
def roomy(start, make_served):
    with start(make_served("chat", context=2048), max_tokens=200) as running:
        yield running


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "kite", "NaN", '{"a": 1} so', "[" * 9999])
def test_a_past_call_may_have_broken_arguments(roomy, tokenizer, arguments):
    """A model wrote them, and the client sends back what it got: the prompt holds them as text."""
    call = {"id": "1", "type": "function", "function": {"name": "kite", "arguments": arguments}}
    said = [QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "error"}]
    if len(arguments) < 99:
        assert roomy.chat(messages=said, tools=TOOLS).status_code == 200
    ids = roomy.http.post("/tokenize", json={"model": "chat", "messages": said}).json()["tokens"]
    assert json.dumps({"name": "kite", "arguments": arguments}) in tokenizer.decode(ids, hide=False)


@pytest.mark.parametrize("arguments", ["{}", " ", "", None, {}])
def test_a_past_call_may_have_no_arguments(roomy, tokenizer, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "kite", "arguments": arguments}}
    said = [QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    ids = roomy.http.post("/tokenize", json={"model": "chat", "messages": said}).json()["tokens"]
    assert json.dumps({"name": "kite", "arguments": {}}) in tokenizer.decode(ids, hide=False)


def test_a_forced_call_does_without_the_format_of_texts(roomy):
    asked = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "max_tokens": 99}
    plain = roomy.chat(**asked).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    both = roomy.chat(**asked, response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert both["tool_calls"][0]["function"] == plain


def count(server, **fields):
    return server.http.post("/tokenize", json={"model": "chat", "messages": [QUESTION], **fields}).json()["count"]


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_one_of_the_allowed_tools(roomy, seed):
    choice = allowed("required", "rain", "city")
    answer = roomy.chat(tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=99).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] in ("rain", "city") and answer["finish_reason"] == "tool_calls"


def test_only_allowed_tools_are_offered(roomy):
    assert count(roomy, tools=TOOLS, tool_choice=allowed("auto", "rain")) == count(roomy, tools=TOOLS[1:2])


def test_allowed_tools_may_be_left_alone(roomy):
    """As with `auto`: this seed's answer is the same, and no call."""
    answers = [
        roomy.chat(tools=TOOLS[1:2], tool_choice=choice, seed=1).json()["choices"]
        for choice in ("auto", allowed("auto", "rain"))
    ]
    assert answers[0] == answers[1] and answers[0][0]["message"]["content"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": TOOLS, "tool_choice": allowed("required", "rain", "nothing")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "nothing")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("never", "rain")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": []}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ({"tool_choice": allowed("auto", "rain")}, "tool_choice"),
    ({"functions": FUNCTIONS}, "functions"),
])  # fmt: skip
def test_a_choice_that_cannot_be_followed_is_refused(roomy, fields, param):
    for path in ("/v1/chat/completions", "/tokenize"):
        asked = {"model": "chat", "messages": [QUESTION], **fields}
        assert error(roomy.http.post(path, json=asked))["param"].startswith(param)


def test_custom_tools_are_refused_by_name(roomy):
    custom = {"type": "custom", "custom": {"name": "kite"}}
    past = [QUESTION, {"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "kite"}}]}]
    for fields in (
        {"tools": [custom]},
        {"tools": TOOLS, "tool_choice": custom},
        {"messages": past},
    ):
        assert "custom" in error(roomy.chat(**fields))["message"]


def spans(*texts):
    return [SpanDelta(kind="tool_call", text=text, number=number, closed=True) for number, text in enumerate(texts)]


@pytest.mark.parametrize("most", [1, 2, None])
def test_no_more_calls_than_asked_for(most):
    calls = [json.dumps({"name": name, "arguments": {}}) for name in "abc"]
    deltas = TurnDeltas(max_calls=most).add(spans(*calls), ended=True)
    names = [call["function"]["name"] for delta in deltas for call in delta["tool_calls"] if "id" in call]
    assert names == list("abc")[:most]


def test_empty_stop_strings_stop_nothing(serving):
    """As null does; others beside them still stop."""
    texts = []
    for path, body in (("chat/completions", {"messages": [QUESTION]}), ("completions", {"prompt": "so it is"})):
        body |= {"model": "chat" if "messages" in body else "base", "seed": 6, "max_tokens": 30}
        texts = [
            serving.http.post(f"/v1/{path}", json={**body, "stop": stop}).json()["choices"]
            for stop in (None, "", [], [""], ["", ""])
        ]
        assert all(each == texts[0] for each in texts)
        text = texts[0][0].get("text") or texts[0][0]["message"]["content"]
        stopped = serving.http.post(f"/v1/{path}", json={**body, "stop": ["", text[4:6]]}).json()["choices"][0]
        assert (stopped.get("text") or stopped["message"]["content"]) == text[: text.index(text[4:6])]


def test_the_first_token_of_an_echo_has_no_log_probability(serving, tokenizer):
    """Of a text too, whose tokens follow the one that begins a document; the others' are those of the ids."""
    text = "so it is"
    asked = {"model": "base", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
    told = serving.http.post("/v1/completions", json={**asked, "prompt": text}).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert None not in told["token_logprobs"][1:] and None not in told["top_logprobs"][1:]
    ids = [tokenizer.begin, *tokenizer.encode(text)]
    same = serving.http.post("/v1/completions", json={**asked, "prompt": ids}).json()["choices"][0]["logprobs"]
    assert same["token_logprobs"][2:] == told["token_logprobs"][1:]


@pytest.mark.parametrize("path", ["embeddings", "responses", "images/generations"])
def test_an_endpoint_that_is_not_served_is_named(serving, path):
    assert f"/v1/{path}" in error(serving.http.post(f"/v1/{path}", json={}), 404)["message"]


def test_an_image_is_named(serving):
    part = {"type": "image_url", "image_url": {"url": "https://example.org/kite.png"}}
    response = serving.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "so"}, part]}])
    assert "image_url" in error(response)["message"]
    part["type"] *= 10_000
    response = serving.chat(messages=[{"role": "user", "content": [part]}])
    assert len(error(response)["message"]) < 400


def test_spoken_answers_are_refused_by_name(roomy):
    assert error(roomy.chat(modalities=["text", "audio"]))["param"] == "modalities"
    assert roomy.chat(modalities=["text"]).status_code == 200


def test_a_missing_field_is_named(roomy):
    assert "allowed_tools" in error(roomy.chat(tools=TOOLS, tool_choice={"type": "allowed_tools"}))["message"]
    assert "name" in error(roomy.chat(response_format={"type": "json_schema", "json_schema": {}}))["message"]


@pytest.mark.parametrize("prompt", ["", [""]])
def test_an_empty_prompt_begins_a_document(serving, tokenizer, prompt):
    asked = {"model": "base", "seed": 2, "max_tokens": 9, "logprobs": 1}
    told, same = (
        serving.http.post("/v1/completions", json={**asked, **more}).json()["choices"]
        for more in ({"prompt": prompt, "echo": True}, {"prompt": [tokenizer.begin]})
    )
    assert told == same


def test_an_error_is_of_the_kind_of_value_that_fits_best(serving):
    assert "at most 16 items" in error(serving.chat(stop=["a"] * 17))["message"]
    assert "at most 256 characters" in error(serving.chat(stop="a" * 257))["message"]
    assert "valid string" in error(serving.chat(stop=1))["message"]
    nameless = [{"type": "function", "function": {"name": "a b"}}]
    assert error(serving.chat(tools=nameless))["param"] == "tools[0].function"
