"""POST /tokenize counts what a request would read: before it is sent."""

import pytest

from penjing.serve import limits

TOOL = {"type": "function", "function": {"name": "kite", "description": "12 kites", "parameters": {}}}
ASK = [{"role": "system", "content": "so"}, {"role": "user", "content": "北京 and 上海 have 12 kites?"}]


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"enable_thinking": False}])
def test_a_chat_is_counted_as_it_is_read(serving, more):
    counted = serving.http.post("/tokenize", json={"model": "chat", "messages": ASK, **more}).json()
    answered = serving.chat(messages=ASK, max_tokens=1, **more).json()
    assert counted["count"] == len(counted["tokens"]) == answered["usage"]["prompt_tokens"]
    assert counted["max_model_len"] == answered["penjing"]["context"]


def test_a_prompt_is_counted_as_it_is_read(serving):
    counted = serving.http.post("/tokenize", json={"model": "base", "prompt": "so it was"}).json()
    asked = {"model": "base", "max_tokens": 1}
    by_text = serving.http.post("/v1/completions", json=asked | {"prompt": "so it was"}).json()
    by_ids = serving.http.post("/v1/completions", json=asked | {"prompt": counted["tokens"]}).json()
    assert counted["count"] == by_text["usage"]["prompt_tokens"] == by_ids["usage"]["prompt_tokens"]


def test_what_cannot_be_counted_is_refused_and_keeps_no_place(serving):
    post = serving.http.post
    for body, status in (
        ({"model": "nobody", "prompt": "so"}, 404),
        ({"model": "chat"}, 400),
        ({"model": "chat", "prompt": 1}, 400),
        ({"model": "chat", "messages": [{"role": "robot", "content": "so"}]}, 400),
        ({"model": "chat", "prompt": "x" * 600_000}, 400),
        ({"model": "chat", "prompt": "x" * limits.MAX_BODY_BYTES}, 413),
    ):
        assert post("/tokenize", json=body).status_code == status
    assert (
        post("/tokenize", json={"model": "chat", "prompt": "so " * 2000}).json()["count"] > 2000
    )  # beyond the context
    assert serving.hub._open == 0


def test_text_parts_are_lines_as_in_training(serving):
    parts = [{"type": "text", "text": "so"}, {"type": "text", "text": "it is"}]
    bodies = [{"model": "chat", "messages": [{"role": "user", "content": text}]} for text in (parts, "so\nit is")]
    first, second = (serving.http.post("/tokenize", json=body).json()["tokens"] for body in bodies)
    assert first == second
