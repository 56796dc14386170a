"""Answers drawn under a grammar fit their schema, whatever the model would rather say."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from penjing.base.errors import UserError
from penjing.data.tokenizer.train import train_tokenizer
from penjing.infer.grammar import ANY_OBJECT, JsonGrammars, call_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "城市": {"enum": ["北京", "東京🙂"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "城市", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(['{"name": "北京 and 上海"}, so it is'] * 9, 330)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return JsonGrammars(tokenizer, tokenizer.size + 11)  # a model may have more rows


def bits(mask, size):
    return np.unpackbits(np.frombuffer(mask.allowed(), np.uint8), bitorder="little")[:size]


def drawn(tokenizer, make, seed, most=400):
    """Ids drawn evenly from those allowed, and whether they came to an end."""
    rng, mask, ids = random.Random(seed), make(), []
    while not mask.finished and len(ids) < most:
        index = rng.choice(np.flatnonzero(bits(mask, tokenizer.size + 11)).tolist())
        mask.accept(index)
        ids.append(index)
        if index in tokenizer.stop:
            return ids[:-1], True
    return ids, mask.finished


def test_random_answers_fit_the_schema(tokenizer, grammars):
    make = grammars.for_schema(SCHEMA)
    for seed in range(40):
        ids, ended = drawn(tokenizer, make, seed)
        value = json.loads(tokenizer.decode(ids, hide=False))
        assert ended and set(value) == set(SCHEMA["required"])
        assert value["城市"] in ("北京", "東京🙂") and 0 <= value["age"] <= 150 and len(value["name"]) <= 5
        assert len(value["tags"]) <= 3


def test_what_the_tokenizer_makes_of_a_right_text_is_allowed(tokenizer, grammars):
    mask = grammars.for_schema(SCHEMA)()
    for index in tokenizer.encode(
        json.dumps({"name": "é小", "城市": "東京🙂", "age": 7, "tags": [True]}, ensure_ascii=False)
    ):
        assert bits(mask, tokenizer.size)[index]
        mask.accept(index)
    allowed = set(np.flatnonzero(bits(mask, tokenizer.size)).tolist())
    assert mask.finished or allowed <= tokenizer.stop


def test_no_control_token_is_text(tokenizer, grammars):
    """In a text value any word may stand, but no token that is structure."""
    mask = grammars.for_schema(ANY_OBJECT)()
    for index in tokenizer.encode('{"na'):
        mask.accept(index)
    assert not bits(mask, tokenizer.size)[sorted(tokenizer.added_ids)].any()
    with pytest.raises(ValueError, match=r"\w"):
        mask.accept(tokenizer.message_end)


def test_a_call_is_of_one_of_the_functions(tokenizer, grammars):
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    make = grammars.for_schema(
        call_schema([{"name": "one", "parameters": parameters}, {"name": "two", "parameters": parameters}])
    )
    calls = [json.loads(tokenizer.decode(drawn(tokenizer, make, seed)[0])) for seed in range(12)]
    assert {call["name"] for call in calls} == {"one", "two"}
    assert all(list(call["arguments"]) == ["x"] for call in calls)


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, {"$ref": "http://x.example/y"}, {"type": "string", "pattern": "(?=a)b"}, {"not": {}}],
)
def test_schemas_that_cannot_be_followed(grammars, schema):
    with pytest.raises(UserError, match="schema"):
        grammars.for_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1_000_003},
        {"$ref": "#"},
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"], "type": "object"} for j in range(4)]} for i in range(9)]},
        json.loads('{"items":' * 180 + "{}" + "}" * 180),
    ],
)
def test_a_schema_that_is_too_large_is_refused(grammars, schema):
    with pytest.raises(UserError):
        grammars.for_schema(schema)
    assert grammars.for_schema(SCHEMA)


@pytest.mark.parametrize("limit", ["SECONDS", "CPU_SECONDS"])
def test_a_grammar_has_limits_of_time(limit):
    """Whichever ends first: time of the processor, or, where others use it, of the clock."""
    script = f"""
import time
from penjing.infer import grammar_process

def build(tokenizer, grammar):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if {limit!r} == "SECONDS":
            time.sleep(30)

grammar_process.build = build
grammar_process.SECONDS = grammar_process.CPU_SECONDS = 50.0
grammar_process.{limit} = 0.2
print(grammar_process._problem(None, "{{}}"))
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert "too large" in done.stdout and time.monotonic() - began < 25


def test_a_grammar_that_is_tried_does_not_delay_the_end(tokenizer):
    grammars, refused = JsonGrammars(tokenizer, tokenizer.size), []
    grammars.for_schema(ANY_OBJECT)
    child = grammars._process
    os.kill(child.pid, signal.SIGSTOP)  # it tries for ever

    def ask():
        try:
            grammars.for_schema(SCHEMA)
        except UserError as error:
            refused.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not grammars._lock.locked():
        time.sleep(0.001)
    closing = threading.Thread(target=grammars.close, daemon=True)
    closing.start()
    for thread in (closing, *threads):
        thread.join(20)
    assert len(refused) == 2 and child.poll() is not None and grammars._process is None
