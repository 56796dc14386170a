"""Schemas and bodies that are made to take the server's time or memory: it refuses or answers them."""

import json
import random
import threading
import time

import httpx
import psutil
import pytest

from penjing.agent_tools.calculator import Calculator
from penjing.infer.grammar import ANY_OBJECT
from penjing.serve import generation, guard

JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "so it is"}
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null", "nothing")
TEXTS = ("", "a", "\\ud800", "(a+)+b", "[", "(?=a)", ".{0,9999}", "#", "#/$defs/a", "北京", "a" * 3000)
NUMBERS = (0, -1, 1, 7, 1_000_003, 2**63, 1e300, 0.001)


def hostile_schema(draw, depth=0):
    """A schema of few keywords, many of them large, cyclic or of the wrong type."""
    if depth > 3 or draw.random() < 0.1:
        return draw.choice([True, False, {}, {"$ref": draw.choice(["#", "#/$defs/a", "#/none"])}, 1, None, "x"])

    def sub():
        return hostile_schema(draw, depth + 1)

    def number():
        return draw.choice(NUMBERS)

    keywords = {
        "type": lambda: draw.choice(TYPES),
        "properties": lambda: {f"p{i}": sub() for i in range(draw.choice([0, 1, 3, 300]) if depth == 0 else 2)},
        "required": lambda: [f"p{i}" for i in range(draw.choice([0, 1, 3, 300]))],
        "additionalProperties": sub,
        "items": sub,
        "prefixItems": lambda: [sub() for _ in range(3)],
        "anyOf": lambda: [sub() for _ in range(draw.randint(0, 4))],
        "oneOf": lambda: [sub() for _ in range(2)],
        "allOf": lambda: [sub() for _ in range(draw.randint(0, 6))],
        "enum": lambda: [draw.choice(TEXTS + NUMBERS) for _ in range(draw.choice([0, 1, 50]))],
        "const": lambda: draw.choice(TEXTS + NUMBERS),
        "pattern": lambda: draw.choice(TEXTS),
        "format": lambda: draw.choice(["date-time", "email", "uuid", "x"]),
        "minLength": number,
        "maxLength": number,
        "minItems": number,
        "maxItems": number,
        "multipleOf": number,
        "minimum": number,
        "maximum": number,
        "$ref": lambda: draw.choice(["#", "#/$defs/a", "#/none", "http://localhost/"]),
        "$defs": lambda: {"a": sub()},
    }
    return {key: keywords[key]() for key in draw.sample(sorted(keywords), draw.randint(1, 4))}


def nested(draw):
    """Nested lists, as text: json.dumps would not write them."""
    depth = draw.choice([10, 180, 900, 50_000])
    return "[" * depth + "]" * depth


def several(item, count):
    """A list of up to 4 MB."""
    return "[" + ",".join([item] * min(count, 4_000_000 // len(item) + 1)) + "]"


def hostile_fields(draw):
    """Fields of a chat request; a text stands for JSON as it is sent."""
    schema = json.dumps(hostile_schema(draw))
    if draw.random() < 0.1:
        schema = draw.choice(['{"a":' + nested(draw) + "}", '{"type":"object","properties":{}}'])
    count = draw.choice([1, 100, 30_000])
    arguments = draw.choice([r'"{\"a\": \"\\ud800\"}"', json.dumps('{"a":' + nested(draw) + "}"), '{"a":"\\ud800"}'])
    call = '{"function":{"name":"f","arguments":' + arguments + "}}"
    tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
    message = draw.choice(["{}", "1", json.dumps(USER), '{"role":"user","content":[1,1,1]}', nested(draw)])
    return draw.choice(
        [
            {"response_format": '{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + "}}"},
            {"response_format": '{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + "}}"},
            {"tools": f"[{tool}]", "tool_choice": '"required"'},
            {"tools": several(tool, 100)},
            {"messages": several(message, count)},
            {"messages": f'[{json.dumps(USER)},{{"role":"assistant","tool_calls":[{call}]}},{json.dumps(USER)}]'},
            {"messages": f'[{{"role":"user","content":{several(message, count)}}}]'},
            {"logit_bias": "{" + ",".join(f'"{i}":1' for i in range(count)) + "}"},
            {"stop": several('"a"', count)},
            {draw.choice(["continue_ids", "stop", "tools", "x"]): nested(draw)},
        ]
    )


def chat_body(fields):
    fields = {"model": '"chat"', "messages": json.dumps([USER]), "max_tokens": "8", **fields}
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def attack(running, seed, requests, seconds):
    """Send hostile bodies. Returns the statuses, and the seconds of each /health meanwhile."""
    draw, statuses, health, ended = random.Random(seed), [], [], threading.Event()

    def watch():
        with httpx.Client(base_url=running.url, timeout=30) as other:
            while not ended.wait(0.05):
                began = time.perf_counter()
                assert other.get("/health").status_code == 200
                health.append(time.perf_counter() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    limit = time.monotonic() + seconds
    try:
        while len(statuses) < requests and time.monotonic() < limit:
            body = chat_body(hostile_fields(draw))
            reply = running.http.post("/v1/chat/completions", content=body, headers=JSON)
            statuses.append(reply.status_code)
            assert reply.status_code in (200, 400, 413), (seed, len(statuses), body[:2000], reply.text)
    finally:
        ended.set()
        watcher.join()
    return statuses, health


@pytest.fixture
def attacked(start, make_served):
    with start(make_served("chat"), max_tokens=16) as running:
        assert running.chat(response_format={"type": "json_object"}).status_code == 200
        yield running


def test_hostile_schemas_and_bodies(attacked):
    statuses, health = attack(attacked, seed=1, requests=60, seconds=20)
    assert {200, 400} <= set(statuses) and health
    assert attacked.chat().status_code == 200


@pytest.mark.timeout(1600)
@pytest.mark.nightly
def test_a_thousand_hostile_schemas_and_bodies(attacked, count):
    """Memory comes back within 10 %."""
    attack(attacked, seed=2, requests=100, seconds=300)
    time.sleep(3)
    before = psutil.Process().memory_info().rss
    statuses, health = attack(attacked, seed=3, requests=1000, seconds=1200)
    time.sleep(3)
    assert psutil.Process().memory_info().rss < 1.1 * before
    count("hostile requests", len(statuses))
    count("p99 of /health, ms", round(sorted(health)[int(0.99 * len(health))] * 1000))
    assert len(statuses) == 1000


CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}


@pytest.mark.parametrize("schema", [CYCLE, {"$ref": "#"}, ENDLESS, WIDE], ids=["cycle", "self", "endless", "wide"])
def test_a_schema_is_followed_or_refused(serving, schema):
    schema_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    reply = serving.chat(response_format=schema_format, max_tokens=32)
    assert reply.status_code == 400 or reply.json()["choices"][0]["message"]["content"]
    assert schema is WIDE or reply.status_code == 400 or reply.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("item", ["1", "{}", '{"role":"user","content":[1]}'])
def test_a_list_is_refused_at_its_first_wrong_item(item):
    from penjing.serve.errors import ApiError
    from penjing.serve.request_body import parse_body
    from penjing.serve.schema import ChatRequest

    body = chat_body({"messages": "[" + ",".join([item] * 9_000) + "]"}).encode()
    with pytest.raises(ApiError, match=r"messages\[0\]") as refused:
        parse_body(body, ChatRequest)
    assert refused.value.__context__.error_count() < 9


LISTS = "[" + ",".join(["[[],[]]"] * 20_000) + "]"
CALL = '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}'
TOOL = '[{"type":"function","function":{"name":"f","parameters":%s}}]'


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "[" + CALL % f'{{"a":{LISTS}}}' + "]"},
        {"tools": TOOL % f'{{"a":{LISTS}}}'},
        {"tools": TOOL % ("{" + ",".join(f'"{i}":1' for i in range(40_000)) + "}")},
        {"unknown": LISTS},
    ],
    ids=["call", "tool", "keys", "unknown"],
)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(serving, fields):
    reply = serving.http.post("/v1/chat/completions", content=chat_body(fields), headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_text_that_looks_like_values_is_text(serving):
    text = 'so "it,{[\\' * 50_000
    reply = serving.chat(messages=[{"role": "user", "content": text}])
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_body_may_be_as_large_as_the_context_needs(start, make_served):
    """128 prompts of ids that fill the context, and prompts of escapes only; not more."""
    with start(make_served("chat", context=64), make_served("other", context=512)) as running:
        post, most = running.http.post, running.app.state.service.models.max_body_bytes
        ids = {"model": "other", "prompt": [[17] * 511] * 128, "max_tokens": 1}
        assert post("/v1/completions", json=ids).status_code == 200
        text = {"model": "other", "prompt": "\u5317" * 511 * 64}
        assert most == (512 << 10) + 512 * 1024
        assert len(json.dumps(text)) < most and post("/tokenize", json=text).status_code == 200
        body = json.dumps({**ids, "prompt": "so"})
        for spaces, status in ((most - len(body), 200), (most - len(body) + 1, 413)):
            assert post("/v1/completions", content=body + " " * spaces, headers=JSON).status_code == status
        with start(make_served("chat", context=4096)) as long:
            errors = []
            for space in ("", " "):  # in a text, which is not parsed, it counts
                arguments = json.dumps(f'{{"a":{space}{LISTS}}}')
                fields = {"messages": f"[{json.dumps(USER)},{CALL % arguments},{json.dumps(USER)}]"}
                reply = long.http.post("/v1/chat/completions", content=chat_body(fields), headers=JSON)
                errors.append(reply.json()["error"])
            assert errors[0]["code"] == errors[1]["code"] == "context_length_exceeded"
            assert errors[0]["message"] != errors[1]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "is_returned"),
    [
        ("/api/tools/call", {"name": "calculator", "arguments": {"expression": "1" * 300_000}}, True),
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "a" * 300_000}]}, True),
        (
            "/v1/chat/completions",
            {"model": "chat", "messages": [USER], "response_format": {"type": "json_object"}},
            True,
        ),
        ("/v1/chat/completions", {"model": "chat", "messages": [USER]}, False),
        ("/api/tools/call", {"name": "calculator", "arguments": {"expression": "1"}}, False),
    ],
    ids=["tool call", "chat", "grammar", "small chat", "small call"],
)
def test_large_work_returns_its_memory(start, make_served, monkeypatch, path, fields, is_returned):
    guards, trim = [], guard.Guard._trim
    monkeypatch.setattr(guard.Guard, "_trim", lambda self: (trim(self), guards.append(self)))
    monkeypatch.setattr(guard, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(generation, "HEAVY_SECONDS", 0.0)
    trimmed = threading.Event()
    monkeypatch.setattr(guard, "malloc_trim", trimmed.set)
    with start(make_served("chat"), tools=["calculator"]) as running:
        running.http.post(path, json={"max_tokens": 2, **fields})
        mine = running.app.middleware_stack
        while not isinstance(mine, guard.Guard):  # another server's may still be trimmed
            mine = mine.app
        limit = time.monotonic() + (20 if is_returned else 0.3)
        while mine not in guards and time.monotonic() < limit:
            time.sleep(0.01)
        assert (mine in guards) == is_returned
        assert not is_returned or trimmed.wait(20)


def test_schemas_take_turns(start, make_served, monkeypatch):
    """One client's schemas are compiled one after another, and 64 of them may wait; others are not delayed."""
    served = make_served("chat")
    free, compiling, for_schema = threading.Event(), [], served.grammars.for_schema

    def compiled(schema):
        if "wait" in schema:
            compiling.append(schema)
            assert free.wait(60)
        return for_schema(ANY_OBJECT)

    monkeypatch.setattr(served.grammars, "for_schema", compiled)
    with start(served) as running:
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"wait": 1}}}
        body = {"model": "chat", "messages": [USER], "max_tokens": 2, "response_format": schema}
        statuses = []

        def ask():
            reply = httpx.post(
                f"{running.url}/v1/chat/completions", json=body, headers={"User-Agent": "greedy"}, timeout=90
            )
            statuses.append(reply.status_code)

        threads = [threading.Thread(target=ask) for _ in range(70)]
        for thread in threads:
            thread.start()
        try:
            while len(statuses) < 6:
                time.sleep(0.01)
            assert set(statuses) == {429} and len(compiling) == 1
            assert running.chat(response_format={"type": "json_object"}).status_code == 200
        finally:
            free.set()
            for thread in threads:
                thread.join()
        assert statuses.count(200) == 64


def test_tool_calls_take_turns(start, make_served, monkeypatch):
    """One client's calls run one after another, and it may have few; another client is not delayed by them."""
    with start(make_served("chat"), tools=["calculator"]) as running:
        free = threading.Event()

        def call(self, arguments):
            if arguments.get("expression") == "wait":
                assert free.wait(30)
            return "3"

        monkeypatch.setattr(Calculator, "call", call)
        tool = {"name": "calculator", "arguments": {"expression": "wait"}}
        statuses = []

        def ask():
            headers = {"User-Agent": "greedy"}
            statuses.append(httpx.post(f"{running.url}/api/tools/call", json=tool, headers=headers).status_code)

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        while len(statuses) < 12:  # 8 have places
            time.sleep(0.01)
        assert set(statuses) == {429}
        reply = running.http.post("/api/tools/call", json={**tool, "arguments": {"expression": "1+2"}})
        assert reply.json()["text"] == "3"
        free.set()
        for thread in threads:
            thread.join()
        assert statuses.count(200) == 8
