"""Tokens that come soon after one another go out in one chunk: nothing is lost, doubled or late by it."""

import json
import threading

import pytest
from sse import events

from penjing.serve import hub

ASK = {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "messages": [{"role": "user", "content": "so it is"}]}
PATIENCE = 30  # seconds: half of what text may gather


class Gated:
    """A model that writes one token once it is shut, and no other before it is open."""

    def __init__(self, forward):
        self.forward, self.gate, self.is_first = forward, threading.Event(), False

    def shut(self):
        self.is_first = True
        self.gate.clear()

    def __getattr__(self, name):
        return getattr(self.forward, name)

    def __call__(self, *rows):
        assert self.is_first or self.gate.wait(PATIENCE)
        self.is_first = False
        return self.forward(*rows)


@pytest.fixture
def patient(start, make_served, monkeypatch):
    """A server that lets text gather for a minute, and its gate."""
    monkeypatch.setattr(hub, "LONGEST_PAUSE", 60.0)
    monkeypatch.setattr(hub, "CHUNKS_PER_SECOND", 1 / 60)
    served = make_served("chat")
    served.engine.forward = Gated(served.engine.forward)
    with start(served) as running:
        yield running, served.engine.forward


def choices(text, stream=True):
    return [choice for chunk in (events(text) if stream else [json.loads(text)]) for choice in chunk["choices"]]


def test_the_first_token_at_once_and_the_rest_with_the_end(patient, tokenizer):
    """Also where another stream's text is gathering."""
    running, model = patient
    bias = {str(index): -100 for index in tokenizer.stop}
    for seed in (1, 2):
        body = {**ASK, "model": "chat", "seed": seed, "logit_bias": bias}
        model.shut()
        with running.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            text = ""
            for part in response.iter_text():
                text += part
                if '"logprobs":{' in text:
                    model.gate.set()
        (whole,) = choices(running.chat(**body).text, stream=False)
        opening, *chunks = choices(text)
        assert opening["delta"]["role"] == "assistant"
        scored = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        assert [len(scores) for scores in scored] == [1, 39]
        assert scored[0] + scored[1] == whole["logprobs"]["content"]
        said = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert said == (whole["message"]["content"] or "") and said
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


def test_texts_of_several_answers(patient, tokenizer):
    """Each answer's own text and scores, however they gather."""
    running, model = patient
    model.gate.set()
    bias = {str(index): -100 for index in tokenizer.stop}
    body = {"model": "chat", "prompt": "so it", "max_tokens": 30, "n": 3, "seed": 3, "logprobs": 1, "logit_bias": bias}
    whole = choices(running.http.post("/v1/completions", json=body).text, stream=False)
    chunks = choices(running.http.post("/v1/completions", json={**body, "stream": True}).text)
    assert len(chunks) < 30
    for index, choice in enumerate(whole):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [each for chunk in own for each in chunk["logprobs"][name]] == choice["logprobs"][name]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
