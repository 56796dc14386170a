"""What the chat page asks beyond OpenAI's API: to go on from given tokens, and what ended an answer."""

import pytest
from sse import events

QUESTION = {"messages": [{"role": "user", "content": "so it is"}], "model": "chat", "logprobs": True, "top_logprobs": 3}
TEXT = {"prompt": "so it is", "model": "base", "logprobs": 3}


def stream(serving, **fields):
    """A greedy answer: the entries of its tokens, its text, and the entries of what ended it."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    response = serving.http.post(path, json={"temperature": 0, "stream": True, **fields})
    assert response.status_code == 200, response.text
    choices = [chunk["choices"][0] for chunk in events(response.text) if chunk["choices"]]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return [entry for each in told for entry in each["content"]], text, [each["end"] for each in told if "end" in each]


@pytest.mark.parametrize("asked", [QUESTION, TEXT], ids=["chat", "text"])
def test_an_answer_goes_on_from_its_own_tokens(serving, asked):
    entries, text, _ = stream(serving, **asked, max_tokens=24)
    ids = [entry["id"] for entry in entries]
    assert len(ids) == 24
    for given in (1, 9, 23):
        after, rest, _ = stream(serving, **asked, max_tokens=24 - given, continue_ids=ids[:given])
        assert [entry["id"] for entry in after] == ids[given:]
        known = b"".join(bytes(entry["bytes"] or ()) for entry in entries[:given]).decode(errors="replace")
        # Half a character at the end comes whole; of bytes that are no text, the last ones may wait for the next.
        ends = [held for held in range(7) if known.endswith("\ufffd" * held)]
        assert text in [known[: len(known) - held] + rest for held in ends]
    other = entries[5]["top_logprobs"][1]
    after, _, _ = stream(serving, **asked, max_tokens=4, continue_ids=[*ids[:5], other["id"]])
    assert [entry["id"] for entry in after] != ids[6:10]


def test_what_ended_an_answer_is_told_and_control_tokens_have_no_bytes(serving, tokenizer):
    end = {"logit_bias": {str(tokenizer.message_end): 100}, "max_tokens": 4}
    entries, text, (ended,) = stream(serving, **QUESTION, **end)
    assert not entries and not text
    assert ended["id"] == tokenizer.message_end and ended["token"] == "<|im_end|>" and ended["bytes"] is None
    assert ended["logprob"] < 0 and len(ended["top_logprobs"]) == 3  # the model's own, before the bias
    entries, text, _ = stream(serving, **TEXT, **end)
    assert [entry["bytes"] for entry in entries] == [None] and not text


@pytest.mark.parametrize(
    "wrong",
    [{"continue_ids": [10**6]}, {"continue_ids": [5], "echo": True}, {"continue_ids": [5], "prompt": ["a", "b"]}],
)
def test_tokens_that_are_none_are_refused(serving, wrong):
    response = serving.http.post("/v1/completions", json={**TEXT, **wrong})
    assert response.status_code == 400 and response.json()["error"]["param"] == "continue_ids"
