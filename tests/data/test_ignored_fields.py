"""No field or mark that changes what is learned is dropped without a word: it is honoured, refused or counted."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import (
    BadRecords,
    Chat,
    Message,
    chat_record,
    read_chats,
    read_documents,
    read_preferences,
    read_prompts,
)
from penjing.data.formats.schema import (
    REASONING_FIELDS,
    SWITCH_FIELDS,
    SYSTEM_FIELDS,
    TOOL_FIELDS,
    is_harmless,
)
from penjing.data.tokenizer.tokenizer import MESSAGE_END, THINK, TOOL_CALL
from penjing.data.tokenizer.train import train_tokenizer

TEXTS = ["Who is it? It is Mia. assistant user system tool <>/|_ 0123456789"] * 2
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, *rows: object, reader: Any = read_chats) -> tuple[list[Any], BadRecords, str]:
    """The records, the counts, and the warning."""
    bad_records = BadRecords(max_bad_fraction=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            records = list(reader([jsonl(path / "data.jsonl", *rows)], bad_records=bad_records))
        except UserError:
            records = []
    return records, bad_records, " ".join(str(warning.message) for warning in caught)


def turns(*pairs: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **more}


def answered(record: dict[str, Any], tmp_path: Path) -> Message:
    (chat,), _, warning = read(tmp_path, record)
    assert not warning
    return chat.messages[-1]


@pytest.mark.parametrize("name", SWITCH_FIELDS)
@pytest.mark.parametrize("off", [0, 0.0, False])
def test_an_answer_with_weight_0_is_read_but_not_learned(tmp_path: Path, name: str, off: object) -> None:
    record = turns(("user", "Who?"), ("assistant", "Ben."), ("user", "Who?"), ("assistant", "Mia."))
    record["messages"][1][name] = off
    record["messages"][3][name] = type(off)(1)
    (chat,), _, warning = read(tmp_path, record)
    assert not warning and [message.is_target for message in chat.messages] == [True, False, True, True]
    tokenizer = train_tokenizer(TEXTS, 300)
    encoded, plain = (
        render(tokenizer, messages)
        for messages in (
            chat.messages,
            read(tmp_path, turns(*[(m.role, m.content) for m in chat.messages]))[0][0].messages,
        )
    )
    assert encoded.ids == plain.ids
    learned = tokenizer.decode([i for i, w in zip(encoded.ids, encoded.weights, strict=True) if w], hide=False)
    assert learned == f"Mia.{MESSAGE_END}"
    assert read(tmp_path, chat_record(chat.messages))[0][0].messages == chat.messages
    record["messages"][3][name] = off
    _, counts, _ = read(tmp_path, record)
    assert counts.left_out == 1 and "weight" in next(iter(counts.reasons))


@pytest.mark.parametrize("value", [0.5, "0", [0], -1, {"a": 1}])
def test_other_weights_are_refused(tmp_path: Path, value: object) -> None:
    record = turns(("user", "Who?"), ("assistant", "Ben."))
    record["messages"][1]["weight"] = value
    records, counts, _ = read(tmp_path, record)
    assert not records and counts.bad == 1 and "messages[1].weight" in counts.first[0]
    record["messages"][1] |= {"weight": 1, "train": False}
    assert not read(tmp_path, record)[0]
    pair = {"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "weight": 0}], "rejected": "c"}
    assert not read(tmp_path, pair, reader=read_preferences)[0]


@pytest.mark.parametrize("name", REASONING_FIELDS)
def test_a_thought_by_any_name(tmp_path: Path, name: str) -> None:
    wanted = Message(role="assistant", content="2", reasoning_content="add")
    record = turns(("user", "1+1?"), ("assistant", "2"))
    record["messages"][1][name] = "add"
    assert answered(record, tmp_path) == wanted
    assert answered({"question": "1+1?", name: "add", "answer": "2"}, tmp_path) == wanted
    assert answered({"instruction": "1+1?", name: "add", "output": "2"}, tmp_path) == wanted
    record["messages"][1] |= dict.fromkeys(REASONING_FIELDS, "add")
    record["messages"][1]["content"] = "<think>add</think>2"
    assert answered(record, tmp_path) == wanted
    record["messages"][1][name] = "other"
    assert read(tmp_path, record)[1].bad == 1


def test_thoughts_without_a_beginning_and_of_a_channel(tmp_path: Path) -> None:
    wanted = Message(role="assistant", content="2", reasoning_content="add")
    assert answered(turns(("user", "1+1?"), ("assistant", "add\n</think>\n\n2")), tmp_path) == wanted
    record = turns(("user", "1+1?"), ("assistant", "add"), ("assistant", "2"))
    record["messages"][1]["channel"], record["messages"][2]["channel"] = "analysis", "final"
    assert answered(record, tmp_path) == wanted
    record["messages"].pop()
    assert read(tmp_path, record)[1].reasons["an answer is empty"] == 1


def test_what_a_question_and_the_tools_are_made_of(tmp_path: Path) -> None:
    (chat,), _, warning = read(tmp_path, {"context": "Mia is here.", "question": "Who?", "answer": "Mia", "id": 3})
    assert chat.messages[0].content == "Mia is here.\n\nWho?" and not warning
    (chat,), _, _ = read(tmp_path, turns(("user", "1+1?"), ("assistant", "2"), functions=[TOOL]))
    assert chat.tools == (TOOL,)
    (chat,), _, _ = read(tmp_path, {"system_prompt": "Be kind.", "question": "Who?", "response": "Mia"})
    assert chat.messages[0] == Message(role="system", content="Be kind.")
    (chat,), _, _ = read(tmp_path, {"context": "Mia is here.", "prompt": "Who?", "gt": "Mia"}, reader=read_prompts)
    assert chat.messages[0].content == "Mia is here.\n\nWho?"


def test_calls_written_as_text_are_calls(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    wanted = Message(role="assistant", content="Let me see.", tool_calls=(call, call))
    assert answered(turns(("user", "1+1?"), ("assistant", f"Let me see.\n{CALL}\n{CALL}")), tmp_path) == wanted
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.control(TOOL_CALL) in render(tokenizer, [Message(role="user", content="?"), wanted]).ids
    for text in (f"{CALL} and so on", "<tool_call>add</tool_call>", "<tool_call>{}", "<tool_call></tool_call>"):
        (chat,), counts, _ = read(tmp_path, turns(("user", "1+1?"), ("assistant", text)))
        assert chat.messages[-1] == Message(role="assistant", content=text)
        assert "the mark <tool_call> as text" in counts.ignored


@pytest.mark.parametrize("mark", ["<|im_start|>", "<|endoftext|>", "<s>", "</s>", THINK, "[INST]", "<|eot_id|>"])
def test_other_marks_are_counted(tmp_path: Path, mark: str) -> None:
    (chat,), counts, warning = read(tmp_path, turns(("user", "Who?"), ("assistant", f"Mia {mark} Ben")))
    assert chat.messages[1].content == f"Mia {mark} Ben"
    assert list(counts.ignored) == [f"the mark {mark} as text"] and mark in warning
    if mark != "<|endoftext|>":
        _, counts, _ = read(tmp_path, {"text": f"a {mark} b"}, reader=read_documents)
        assert list(counts.ignored) == [f"the mark {mark} as text"]


def test_separators_inside_lines_separate_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one<|endoftext|>two\nlines<|endoftext|>\n\nthree\n<|endoftext|>\nfour<|endoftext|>")
    found = list(read_documents([path]))
    assert [(d.text, d.line) for d in found] == [("one", 1), ("two\nlines", 1), ("three", 4), ("four", 6)]
    records, counts, warning = read(tmp_path, {"text": "a <|endoftext|>b<|endoftext|>"}, reader=read_documents)
    assert [record.text for record in records] == ["a ", "b"] and counts.good == 1 and not warning


def test_a_switch_of_a_document_is_counted(tmp_path: Path) -> None:
    _, counts, _ = read(tmp_path, {"text": "a", "train": False}, {"text": "b", "weight": 1}, reader=read_documents)
    assert counts.ignored == {"field train": (1, f"{tmp_path}/data.jsonl:1")}


NAMES = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12
) | st.sampled_from(
    [
        *SWITCH_FIELDS,
        *REASONING_FIELDS,
        *TOOL_FIELDS,
        *SYSTEM_FIELDS,
        "context",
        "choices",
        "channel",
        "input",
        "history",
    ]
)
VALUES = st.sampled_from([0, False, True, 0.5, "words of it", ["x"], {"a": 1}, [{"name": "f"}], [["q", "a"]]])
BASES = [
    turns(("user", "Who is it?"), ("assistant", "It is Mia.")),
    {"question": "Who is it?", "answer": "It is Mia."},
    {"instruction": "Who is it?", "output": "It is Mia."},
    {"conversation": [{"human": "Who is it?", "assistant": "It is Mia."}]},
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=st.sampled_from(BASES), name=NAMES, value=VALUES, of_message=st.booleans())
def test_no_field_is_dropped_without_a_word(
    tmp_path: Path, base: dict[str, Any], name: str, value: Any, of_message: bool
) -> None:
    record = json.loads(json.dumps(base))
    holder = next(iter(record.values()))[-1] if of_message and isinstance(next(iter(record.values())), list) else record
    if name in holder or is_harmless(name):
        return
    before: list[Chat] = read(tmp_path, record)[0]
    holder[name] = value
    after, counts, warning = read(tmp_path, record)
    is_switched_on = name in SWITCH_FIELDS and value is True and holder is not record
    is_empty_list = name in (*TOOL_FIELDS, "history") and value in (0, False)
    assert after != before or counts.bad or counts.ignored or is_switched_on or is_empty_list
    assert bool(counts.ignored) == bool(warning) or counts.bad


def test_errors_of_data_that_no_fraction_allows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[{"a": 1}] * 3)
    with raises_user_error(what="3 of 3") as caught:
        list(read_chats([path], bad_records=BadRecords()))
    assert "max_bad_fraction" not in caught.value.line()
    path = jsonl(tmp_path / "b.jsonl", *[turns(("user", "a"), ("assistant", " "))] * 3)
    with raises_user_error(what="an answer is empty: 3"):
        list(read_chats([path], bad_records=BadRecords()))


@pytest.mark.parametrize(("reader", "row"), [
    (read_chats, {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mia."}]}),
    (read_chats, {"instruction": "Who?", "output": "Mia."}),
    (read_chats, {"question": "Who?", "answer": "Mia."}),
    (read_preferences, {"prompt": "Who?", "chosen": "Mia.", "rejected": "Ben."}),
    (read_preferences, {"prompt": "Who?", "completion": "Mia.", "kto_tag": True}),
    (read_prompts, {"prompt": "Who?", "gt": "Mia", "tests": "x", "cases": []}),
    (read_documents, {"text": "Mia is here."}),
])  # fmt: skip
@pytest.mark.parametrize("name", [
    "weight_at", "num_weight", "loss_tokens", "train_at", "input_ids", "labels", "answer_id", "type", "score", "meta",
    "metadata", "title", "class", "rating", "ignore", "chosen_score", "output", "idea",
])  # fmt: skip
def test_only_known_fields_are_harmless(tmp_path: Path, reader: Any, row: dict[str, Any], name: str) -> None:
    before, counts, _ = read(tmp_path, row | {"id": 1, "Task-ID": 2, "createdAt": 3, "source": "web"}, reader=reader)
    assert before and not counts.ignored
    if name not in row:
        after, counts, warning = read(tmp_path, row | {name: [0]}, reader=reader)
        assert len(after) == 1 and list(counts.ignored) == [f"field {name}"] and name in warning


def test_a_label_of_a_pair_and_a_margin_of_a_label_are_counted(tmp_path: Path) -> None:
    pair = {"prompt": "Who?", "chosen": "Mia.", "rejected": "Ben.", "margin": 1.0, "label": False}
    assert list(read(tmp_path, pair, reader=read_preferences)[1].ignored) == ["field label"]
    labelled = {"prompt": "Who?", "completion": "Mia.", "label": False, "margin": 1.0}
    assert list(read(tmp_path, labelled, reader=read_preferences)[1].ignored) == ["field margin"]


def test_all_columns_of_a_table_of_documents_are_counted(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"id": [1, 2], "train": [True, False], "text": ["a", "b"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    counts = BadRecords()
    with pytest.warns(UserWarning, match="field train"):
        found = list(read_documents([tmp_path / "a.parquet"], bad_records=counts))
    assert [document.text for document in found] == ["a", "b"]
    assert counts.ignored == {"field train": (1, f"{tmp_path}/a.parquet:2")}
