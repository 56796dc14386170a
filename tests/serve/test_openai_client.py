"""The official client, unmodified, against a real port."""

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

ASK = {"model": "chat", "messages": [{"role": "user", "content": "so it is"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "maxLength": 6}},
            "required": ["expression"],
            "additionalProperties": False,
        },
    },
}


def test_models(client):
    names = [model.id for model in client.models.list()]
    assert names == ["chat", "base"]
    assert client.models.retrieve("chat").penjing["context"] == 256
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../chat")


def test_a_chat_whole_and_streamed_are_the_same_text(client):
    asked = {**ASK, "max_tokens": 24, "seed": 5}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant" and whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text, thought, finish, usage = "", "", None, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
    assert text == (message.content or "") and finish == whole.choices[0].finish_reason
    assert thought == (getattr(message, "reasoning_content", None) or "")
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_the_last_chunk_tells_how_fast_it_was(client):
    *_, last = client.chat.completions.create(**ASK, stream=True, max_tokens=5)
    assert last.penjing["context"] == 256 and last.penjing["time_to_first_token_s"] > 0


def test_n_answers_have_seeds_of_their_own(client):
    together = client.chat.completions.create(**ASK, n=3, seed=11, max_tokens=12)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [client.chat.completions.create(**ASK, seed=11 + k, max_tokens=12).choices[0].message for k in range(3)]
    assert [choice.message for choice in together.choices] == alone


def test_logprobs_of_a_chat(client, tokenizer):
    choice = client.chat.completions.create(**ASK, temperature=0, max_tokens=6, logprobs=True, top_logprobs=5).choices[
        0
    ]
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert entry.top_logprobs[0].logprob == entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert tokenizer.token_bytes(entry.id) == bytes(entry.bytes)
    said = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode(errors="replace")
    assert (choice.message.content or "").strip() in said


def test_streamed_logprobs_are_those_of_the_whole(client):
    asked = {**ASK, "seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else ())
    ]
    assert [entry.to_dict() for entry in streamed] == [entry.to_dict() for entry in whole]


def test_going_on_from_an_alternative(client):
    """The answer's beginning with another token is gone on from as the model would have."""
    asked = {**ASK, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    first = client.chat.completions.create(**asked, max_tokens=8).choices[0].logprobs.content
    ids = [entry.id for entry in first]
    again = client.chat.completions.create(**asked, max_tokens=4, extra_body={"continue_ids": ids[:4]})
    assert [entry.id for entry in again.choices[0].logprobs.content] == ids[4:8]
    other = [*ids[:2], first[2].top_logprobs[3].id]
    told = client.chat.completions.create(**asked, max_tokens=4, extra_body={"continue_ids": other}, stream=True)
    assert sum(len(c.choices[0].logprobs.content) for c in told if c.choices and c.choices[0].logprobs) <= 4


def test_stop_strings(client):
    asked = {**ASK, "seed": 2, "max_tokens": 40}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[5:8]
    for stream in (False, True):
        answer = client.chat.completions.create(**asked, stop=["not said", stop], stream=stream)
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        said = "".join((c.delta if stream else c.message).content or "" for c in choices)
        assert said == text[: text.index(stop)] and choices[-1].finish_reason == "stop"


def test_a_tool_that_has_to_be_called(client):
    for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
        answer = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=choice, seed=1, max_tokens=60)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "calculator" and call.id.startswith("call_")
        assert set(json.loads(call.function.arguments)) == {"expression"}
        parts, name = "", ""
        for chunk in client.chat.completions.create(
            **ASK, tools=[TOOL], tool_choice=choice, seed=1, max_tokens=60, stream=True
        ):
            for part in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                name += part.function.name or ""
                parts += part.function.arguments or ""
        assert (name, parts) == (call.function.name, call.function.arguments)
        more = [*ASK["messages"], answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        assert client.chat.completions.create(model="chat", messages=more, tools=[TOOL], max_tokens=4).choices


def test_no_tool_is_offered_where_none_is_to_be_called(client):
    with_none = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="none", max_tokens=2)
    assert with_none.usage.prompt_tokens == client.chat.completions.create(**ASK, max_tokens=2).usage.prompt_tokens
    offered = client.chat.completions.create(**ASK, tools=[TOOL], max_tokens=2)
    assert offered.usage.prompt_tokens > with_none.usage.prompt_tokens


class Place(BaseModel):
    kites: int
    city: bool


def test_json_by_schema(client):
    answer = client.chat.completions.parse(**ASK, response_format=Place, seed=4, max_tokens=64)
    assert isinstance(answer.choices[0].message.parsed, Place)
    free = client.chat.completions.create(**ASK, response_format={"type": "json_object"}, seed=8, max_tokens=3)
    assert free.choices[0].message.content.startswith("{")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, response_format=schema)


def test_logit_bias_and_penalties(client, tokenizer):
    index = tokenizer.encode("kites")[0]
    answer = client.chat.completions.create(
        **ASK, logit_bias={str(index): 100}, max_tokens=5, logprobs=True, frequency_penalty=1.5, presence_penalty=0.5
    )
    assert [entry.id for entry in answer.choices[0].logprobs.content] == [index] * 5


def test_thinking_opens_a_thought(client):
    for name in ("enable_thinking", "open_thinking"):
        for fields in ({name: True}, {"chat_template_kwargs": {name: True}}):
            answer = client.chat.completions.create(**ASK, extra_body=fields, max_tokens=8, seed=1)
            assert answer.choices[0].message.reasoning_content


def test_developer_is_the_system(client):
    user = {"role": "user", "content": [{"type": "text", "text": "so "}, {"type": "text", "text": "it is"}]}
    counts = [
        client.chat.completions.create(
            model="chat", messages=[{"role": role, "content": "be kind"}, user], max_completion_tokens=2, seed=1
        )
        for role in ("system", "developer")
    ]
    assert counts[0].choices[0].message == counts[1].choices[0].message
    assert counts[0].usage == counts[1].usage.model_copy(
        update={"prompt_tokens_details": counts[0].usage.prompt_tokens_details}
    )


def test_completions_of_texts_and_ids(client, tokenizer):
    asked = {"model": "base", "max_tokens": 6, "temperature": 0}
    text = client.completions.create(prompt="so it", **asked).choices[0].text
    ids = [tokenizer.begin, *tokenizer.encode("so it")]
    assert client.completions.create(prompt=ids, **asked).choices[0].text == text
    several = client.completions.create(prompt=["so it", "北京"], n=2, **asked).choices
    assert [choice.index for choice in several] == [0, 1, 2, 3]
    assert several[0].text == several[1].text == text
    batch = client.completions.create(prompt=[ids, ids], **asked).choices
    assert [choice.text for choice in batch] == [text, text]


def test_echo_with_logprobs(client, tokenizer):
    asked = {"model": "base", "temperature": 0, "echo": True, "logprobs": 3}
    choice = client.completions.create(prompt="so it is 北京", max_tokens=2, **asked).choices[0]
    assert choice.text.startswith("so it is 北京")
    lists = (choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset)
    count = len(tokenizer.encode("so it is 北京"))
    assert {len(each) for each in lists} == {count + 2}
    ids = tokenizer.encode("so it is 北京")
    assert lists[2][:count] == [len(tokenizer.decode(ids[:place]).rstrip("\ufffd")) for place in range(count)]
    assert lists[2][count] == len("so it is 北京")
    assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs[1:])
    scored = client.completions.create(prompt="so it is 北京", max_tokens=0, **asked).choices[0]
    assert scored.text == "so it is 北京"
    assert scored.logprobs.token_logprobs == choice.logprobs.token_logprobs[:count]
    ids = client.completions.create(prompt=tokenizer.encode("so it is"), max_tokens=0, **asked).choices[0]
    assert ids.logprobs.token_logprobs[0] is None and None not in ids.logprobs.token_logprobs[1:]


def test_offsets_count_only_the_text(client, tokenizer):
    """A token that begins a turn is not in the text of an answer; in an echoed prompt it is."""
    begin = tokenizer.control("<|im_start|>")
    asked = {"model": "base", "logprobs": 0, "temperature": 0, "logit_bias": {str(begin): 100}, "max_tokens": 2}
    choice = client.completions.create(prompt="so", **asked).choices[0]
    assert (choice.text, choice.logprobs.text_offset) == ("", [0, 0])
    choice = client.completions.create(prompt=[begin], echo=True, **asked).choices[0]
    assert (choice.text, choice.logprobs.text_offset) == ("<|im_start|>", [0, 12, 12])


def test_a_streamed_completion(client):
    asked = {"model": "base", "prompt": "so it", "max_tokens": 9, "seed": 4}
    whole = client.completions.create(**asked).choices[0]
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True) if c.choices]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="chat/../base", messages=ASK["messages"])
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**ASK, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "kites " * 300}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as chat:
        client.chat.completions.create(model="base", messages=ASK["messages"])
    assert chat.value.param == "model"
    with pytest.raises(openai.BadRequestError) as middle:
        client.completions.create(model="base", prompt="a", suffix="b")
    assert middle.value.param == "suffix"


def test_a_clients_timeout_ends_the_request(client, serving):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).chat.completions.create(**ASK, n=16, max_tokens=64)
    serving.idle()


def test_many_at_once_say_what_they_say_alone(serving):
    """Through HTTP too, who else is in the batch has no part in the text."""
    asked = [{**ASK, "seed": k, "max_tokens": 16, "temperature": 0.0 if k % 3 == 0 else 1.0} for k in range(12)]
    alone = [serving.openai.chat.completions.create(**each).choices[0].message.content for each in asked]

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:

            async def one(each):
                text = ""
                async for chunk in await client.chat.completions.create(**each, stream=True):
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                return text

            return await asyncio.gather(*map(one, asked))

    assert asyncio.run(together()) == alone
