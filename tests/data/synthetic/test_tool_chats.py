"""Conversations in which a calculator is called: what they say is right, and what a model learns of them is its own."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from penjing.agent_tools.box import Toolbox
from penjing.data import synthetic as toyworld
from penjing.data.chat.render import render
from penjing.data.chat.turn_parser import ToolCall
from penjing.data.corpus import Split
from penjing.data.formats import Chat, read_chats, read_prompts
from penjing.data.synthetic.dataset_rows import TOOLS
from penjing.data.synthetic.tools import CALCULATOR, KINDS, tool_task
from penjing.data.tokenize_dataset import prepare_chats
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer

SIZES = {"documents": 5, "conversations": 5, "preferences": 5, "prompts": 5, "questions_per_kind": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tools")
    counts = toyworld.write(path, seed=1, **SIZES, tools=200)
    assert (counts["tools.jsonl"]["rows"], counts["tools_rl.jsonl"]["rows"]) == (200, 50)
    return path


@pytest.fixture(scope="module")
def chats(folder: Path) -> list[Chat]:
    return list(read_chats([folder / "tools.jsonl"]))


@pytest.fixture(scope="module")
def tokenizer(chats: list[Chat]) -> Tokenizer:
    return train_tokenizer((message.content for chat in chats for message in chat.messages), 400)


def test_the_calculator_is_the_one_that_there_is() -> None:
    assert Toolbox(["calculator"]).schemas == [CALCULATOR]
    (taught,) = json.loads(TOOLS)
    (offered,) = Toolbox(["calc"]).schemas
    assert json.dumps(offered) == json.dumps(taught["function"])  # in this order: the model reads it as text


def test_every_result_is_what_the_calculator_says(chats: list[Chat]) -> None:
    box = Toolbox(["calculator"])
    kinds: Counter[int] = Counter()
    for chat in chats:
        assert chat.tools == (CALCULATOR,)
        results = []
        for message, after in zip(chat.messages, chat.messages[1:], strict=False):
            if message.tool_calls:
                (call,) = message.tool_calls
                (result,) = box.run([ToolCall(name=call["name"], arguments=call["arguments"])])
                assert result.worked and (after.role, after.content) == ("tool", result.text)
                results.append(result.text)
        kinds[len(results)] += 1
        assert not results or chat.messages[-1].content == results[-1]
        thoughts = {bool(message.reasoning_content) for message in chat.messages if message.role == "assistant"}
        assert len(thoughts) == 1
    assert set(kinds) == {0, 1, 2}


def test_prompts_have_their_answers(folder: Path) -> None:
    found = Counter()
    for number, chat in enumerate(read_prompts([folder / "tools_rl.jsonl"])):
        record = chat.fields
        assert record["gt"] == [tool_task("tools_rl", 1, number).answer] and chat.tools == (CALCULATOR,)
        found[record["kind"], record["language"]] += 1
    assert {kind for kind, _ in found} == set(KINDS) and {language for _, language in found} == {"en", "zh"}


def test_they_are_the_same_everywhere_and_apart_from_each_other(folder: Path) -> None:
    digest = hashlib.sha256((folder / "tools.jsonl").read_bytes() + (folder / "tools_rl.jsonl").read_bytes())
    assert digest.hexdigest()[:16] == "e89b48884f5941cf"
    asked = {tool_task("tools", 1, index).question for index in range(2000)}
    assert len(asked & {tool_task("tools_rl", 1, index).question for index in range(500)}) < 25


def test_sft_learns_calls_and_answers_and_no_result(chats: list[Chat], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In the shards, too: whole conversations, the switch written into them."""
    split = Split(share=0.2)
    made = prepare_chats(split.placed(chats), tokenizer, tmp_path, seq_len=1000, split=split, about={}, thinking=False)
    assert not made.skipped and not made.shortened
    for chat in chats[:50]:
        rendered = render(tokenizer, chat.messages, chat.tools, thinking=False)
        taught = [index for index, weight in zip(rendered.ids, rendered.weights, strict=True) if weight]
        text = tokenizer.decode(taught, hide=False)
        answers = [message for message in chat.messages if message.role == "assistant"]
        assert text.count("<think>") == text.count("</think>") == len(answers) == text.count("<|im_end|>")
        assert text.count("<think></think>") == sum(not message.reasoning_content for message in answers)
        assert text.count("<tool_call>") == sum(len(message.tool_calls) for message in answers)
        assert "tool_response" not in text and "# Tools" not in text and chat.messages[0].content not in text
    half = made.train
    plain = prepare_chats(split.placed(chats), tokenizer, tmp_path / "plain", seq_len=1000, split=split, about={})
    assert half.num_tokens > plain.train.num_tokens


def test_minimind_files_of_its_agent_stage_are_read(tmp_path: Path) -> None:
    """Tools as a text on the system turn, calls as a text on the answer, `gt` beside the conversation."""
    system = {"role": "system", "content": "", "tools": json.dumps([{"type": "function", "function": CALCULATOR}])}
    call = {"role": "assistant", "content": "", "reasoning_content": "hm",
            "tool_calls": json.dumps([{"name": "calculator", "arguments": {"expression": "1+1"}}])}  # fmt: skip
    talk = [system, {"role": "user", "content": "1+1?"}, call, {"role": "tool", "content": "2"}]
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"conversations": [*talk, {"role": "assistant", "content": "2"}]}))
    (chat,) = read_chats([path])
    assert chat.tools == (CALCULATOR,) and chat.messages[1].tool_calls[0]["arguments"] == {"expression": "1+1"}
    path.write_text(json.dumps({"conversations": [*talk[:2], {"role": "assistant", "content": ""}], "gt": ["2"]}))
    (asked,) = read_prompts([path])
    assert asked.tools == (CALCULATOR,) and asked.fields["gt"] == ["2"]
