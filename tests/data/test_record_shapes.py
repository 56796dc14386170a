"""Records as people publish them: each becomes what its author meant; what it is read as and repairs are counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.corpus import Corpus, DataSettings, Split
from penjing.data.formats import BadRecords, Chat, Message, read_chats, read_documents, read_preferences, read_prompts
from penjing.data.formats.fields import parse_columns
from penjing.data.formats.loose_json import parsed_json
from penjing.data.tokenize_dataset import prepare_chats
from penjing.data.tokenizer.train import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:in the data but without effect")


def written(tmp_path: Path, record: object, name: str = "a.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(record if isinstance(record, str) else json.dumps(record) + "\n", encoding="utf-8")
    return path


def read(
    tmp_path: Path, record: object, name: str = "a.jsonl", *, reader: Any = read_chats, columns: tuple[str, ...] = ()
) -> tuple[list[Any], BadRecords]:
    counts = BadRecords(max_bad_fraction=1)
    path = written(tmp_path, record, name)
    return list(reader([path], bad_records=counts, columns=parse_columns(columns))), counts


def words(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def turns(*pairs: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs], **more}


ASKED = [("user", "Who?"), ("assistant", "Mia")]


@pytest.mark.parametrize(
    ("record", "roles"),
    [
        ({"instruction": "Who?", "response": "Mia"}, {"instruction": "question", "response": "answer"}),
        ({"input": "Who?", "target": "Mia"}, {"input": "question", "target": "answer"}),
        ({"input": "Who?", "output": "Mia"}, {"input": "question", "output": "answer"}),
        ({"inputs": "Who?", "targets": "Mia"}, {"inputs": "question", "targets": "answer"}),
        ({"problem": "Who?", "solution": "Mia", "answer": "M"}, {"problem": "question", "solution": "answer"}),
        ({"query": "Who?", "response": "Mia"}, {"query": "question", "response": "answer"}),
        ({"q": "Who?", "a": "Mia"}, {"q": "question", "a": "answer"}),
        ({"Question": "Who?", "ANSWER": "Mia"}, {"Question": "question", "ANSWER": "answer"}),
        ({"context": "Who?", "continuation": "Mia"}, {"context": "question", "continuation": "answer"}),
        ({"prompt": " ", "question": "Who?", "answer": "Mia", "prompt_id": 1}, None),
        (
            {"prompt": [{"role": "user", "content": "Who?"}], "completion": [{"role": "assistant", "content": "Mia"}]},
            None,
        ),
        (turns(*ASKED), {"messages": "messages"}),
        ({"chat": "USER: Who?\n\n\nASSISTANT: Mia <|endoftext|>\n\n\n"}, {"chat": "messages"}),
        ({"conversation": "Human: Who?\n\nAssistant: Mia"}, {"conversation": "messages"}),
    ],
)
def test_names_of_a_question_and_its_answer(tmp_path: Path, record: Any, roles: dict[str, str] | None) -> None:
    (chat,), counts = read(tmp_path, record)
    assert words(chat) == ASKED
    if roles is not None:
        assert dict(counts.roles) == dict.fromkeys(roles.items(), 1)


def test_a_run_says_what_fields_are_read_as(tmp_path: Path) -> None:
    _, counts = read(tmp_path, {"problem": "Who?", "solution": "Mia"})
    assert counts.note() == "read problem as question, solution as answer"
    for plain in (turns(*ASKED), {"prompt": "Who?", "response": "Mia"}):
        assert read(tmp_path, plain)[1].note() == ""


def test_lines_of_a_poem_are_its_text(tmp_path: Path) -> None:
    path = written(tmp_path, "".join(json.dumps({"paragraphs": lines}) + "\n" for lines in (["a", "b"], [], ["c"])))
    counts = BadRecords()
    assert [document.text for document in read_documents([path], bad_records=counts)] == ["a\nb", "c"]
    assert counts.left_out == 1 and not counts.bad


def test_context_follows_an_instruction(tmp_path: Path) -> None:
    (chat,), counts = read(tmp_path, {"instruction": "Who?", "context": "Mia is here.", "response": "Mia"})
    assert words(chat) == [("user", "Who?\nMia is here."), ("assistant", "Mia")]
    assert ("context", "question") in counts.roles


QUESTION = "Who?\nA. Ben\nB. Mia"


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Who?", "choices": ["Ben", "Mia"], "answer": 1},
        {"question": "Who?", "choices": ["Ben", "Mia"], "answer": "B"},
        {"question": "Who?", "choices": ["Ben", "Mia"], "answer": "(b)"},
        {"question": "Who?", "choices": ["Ben", "Mia"], "answer": "Mia"},
        {"question": "Who?", "options": ["A) Ben", "B) Mia"], "correct": "B"},
        {"question": "Who?", "options": {"A": "Ben", "B": "Mia"}, "answer_idx": "B"},
        {"question": "Who?", "choices": {"text": ["Ben", "Mia"], "label": ["A", "B"]}, "answerKey": "B"},
        {"Question": "Who?", "A": "Ben", "B": "Mia", "Answer": "B"},
        {"query": "Who?", "choices": ["Ben", "Mia"], "gold": 1},
        {"question": "Who?", "choices": json.dumps(["Ben", "Mia"]), "answer": "1"},
    ],
)
def test_choices_stand_in_the_question_and_the_right_one_in_the_answer(tmp_path: Path, record: Any) -> None:
    (chat,), counts = read(tmp_path, record)
    assert words(chat) == [("user", QUESTION), ("assistant", "B. Mia")] and not counts.ignored
    (prompt,), _ = read(tmp_path, record, reader=read_prompts)
    assert words(prompt) == [("user", QUESTION)] and prompt.fields["gt"] == ["B. Mia", "B", "Mia"]


def test_an_answer_that_names_no_choice_is_broken_and_one_in_words_stays(tmp_path: Path) -> None:
    for answer in (2, -1, True, "E", "", None, 7.5):
        path = written(tmp_path, {"question": "Who?", "choices": ["Ben", "Mia"], "answer": answer})
        with raises_user_error(where=f"{path}:1"):
            list(read_chats([path]))
    (chat,), _ = read(tmp_path, {"question": "Who?", "choices": ["Ben", "Mia"], "answer": "It is her."})
    assert chat.messages[-1].content == "It is her."
    (chat,), _ = read(tmp_path, {"query": "Who?\nA. Ben\nB. Mia", "choices": ["A", "B"], "gold": 1})
    assert words(chat) == [("user", QUESTION), ("assistant", "B")]


@pytest.mark.parametrize("style", [json.dumps, repr])
def test_conversations_as_text_in_a_column(tmp_path: Path, style: Any) -> None:
    messages = style(turns(*ASKED)["messages"])
    table = f'id,messages\n1,"{messages.replace(chr(34), chr(34) * 2)}"\n'
    assert words(read(tmp_path, table, "a.csv")[0][0]) == ASKED
    assert words(read(tmp_path, {"conversations": messages})[0][0]) == ASKED
    pair = {
        "chosen": messages,
        "rejected": style([{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "no"}]),
    }
    (preference,), _ = read(tmp_path, pair, reader=read_preferences)
    assert [words(chat)[-1][1] for chat in preference.chats] == ["Mia", "no"]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"messages": [messages]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert words(next(read_chats([tmp_path / "a.parquet"]))) == ASKED


def test_a_line_that_is_a_text_of_json(tmp_path: Path) -> None:
    line = json.dumps(json.dumps(turns(*ASKED)))
    assert words(read(tmp_path, line)[0][0]) == ASKED
    assert words(read(tmp_path, f"[{line}, {line}]", "a.json")[0][1]) == ASKED
    for bad in ('"{broken"', '"a"', json.dumps(line), '"[1]"'):
        with raises_user_error(what="not a record", got="text"):
            list(read_chats([written(tmp_path, bad)]))


def test_a_text_that_only_looks_like_json_stays_a_text(tmp_path: Path) -> None:
    for text in ('[{"name": "Ben"}]', "[1, 2]", "{x}", "[]", "{}", "[" * 50_000):
        (preference,), _ = read(
            tmp_path, {"prompt": text, "chosen": text + "a", "rejected": "b"}, reader=read_preferences
        )
        assert words(preference.chats[0]) == [("user", text), ("assistant", text + "a")]


def test_the_old_tables_of_minimind(tmp_path: Path) -> None:
    table = "history,q,a\n[],Who?,Mia\n\"[['Hi', 'Hello'], ['So', 'it is']]\",Who?,Mia\n,Who?,Mia\n"
    chats, counts = read(tmp_path, table, "sft.csv")
    assert [words(chat)[-2:] for chat in chats] == [ASKED] * 3 and counts.good == 3
    assert [content for _, content in words(chats[1])[:4]] == ["Hi", "Hello", "So", "it is"]
    assert [d.text for d in read(tmp_path, "text\nonce\n", "pretrain.csv", reader=read_documents)[0]] == ["once"]
    record = turns(("user", "1+1?"), ("assistant", "<think>\nadd\n</think>\n<answer>\n2\n</answer>"))
    assert read(tmp_path, record)[0][0].messages[-1] == Message(role="assistant", content="2", reasoning_content="add")


@pytest.mark.parametrize(
    "marks", [("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<reasoning>", "</reasoning>")]
)
def test_thoughts_in_other_marks(tmp_path: Path, marks: tuple[str, str]) -> None:
    wanted = Message(role="assistant", content="2", reasoning_content="add")
    for answer in ("\n2", "\n<answer>2</answer>\n"):
        record = turns(("user", "1+1?"), ("assistant", f"{marks[0]}\nadd\n{marks[1]}{answer}"))
        assert read(tmp_path, record)[0][0].messages[-1] == wanted
    for text in (f"{marks[0]} no end", f"first {marks[0]}x{marks[1]}", f"x{marks[1]} y"):
        assert read(tmp_path, turns(("user", "1+1?"), ("assistant", text)))[0][0].messages[-1].content == text


def test_thoughts_of_other_fields_and_of_open_thoughts(tmp_path: Path) -> None:
    wanted = Message(role="assistant", content="2", reasoning_content="add")
    record = {"Question": "1+1?", "Complex_CoT": "add", "Response": "2"}
    chats, counts = read(tmp_path, record)
    assert chats[0].messages[-1] == wanted and ("Complex_CoT", "thought") in counts.roles
    text = "<|begin_of_thought|>\n\nadd\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\n2\n\n<|end_of_solution|>"
    assert read(tmp_path, turns(("user", "1+1?"), ("assistant", text)))[0][0].messages[-1] == wanted


# ------------------------------------------------------------------------------------------------ order of turns


@pytest.mark.parametrize(
    ("messages", "wanted", "repairs"),
    [
        ([("assistant", "Hello"), *ASKED], [("assistant", "Hello"), *ASKED], {"greeting"}),
        (
            [("system", "s"), ("assistant", "Hello"), *ASKED],
            [("system", "s"), ("assistant", "Hello"), *ASKED],
            {"greeting"},
        ),
        ([("user", "So,"), *ASKED], [("user", "So,\n\nWho?"), ("assistant", "Mia")], {"merged"}),
        ([*ASKED, ("assistant", "again")], [("user", "Who?"), ("assistant", "Mia\n\nagain")], {"merged"}),
        ([("user", "Who?"), *ASKED], ASKED, {"merged"}),
        ([*ASKED, ("user", "And?"), ("assistant", " ")], ASKED, {"empty"}),
        (
            [("user", "So,"), ("assistant", ""), *ASKED],
            [("user", "So,\n\nWho?"), ("assistant", "Mia")],
            {"empty", "merged"},
        ),
        (
            [*ASKED, ("user", ""), ("assistant", "again")],
            [("user", "Who?"), ("assistant", "Mia\n\nagain")],
            {"empty", "merged"},
        ),
        ([("system", "a"), ("system", "b"), *ASKED], [("system", "a\n\nb"), *ASKED], {"merged"}),
    ],
)
def test_turns_out_of_order_are_repaired_and_counted(
    tmp_path: Path, messages: Any, wanted: Any, repairs: set[str]
) -> None:
    (chat,), counts = read(tmp_path, turns(*messages))
    assert words(chat) == wanted
    assert all(any(word in name for name in counts.changed) for word in repairs)
    assert set(counts.changed.values()) == {1} and len(counts.changed) == len(repairs)
    assert counts.note().startswith("of 1 records 0 are broken and 0 left out; changed (")
    first_user = [role for role, _ in wanted].index("user")
    assert [m.is_target for m in chat.messages] == [
        not (m.role == "assistant" and number < first_user) for number, m in enumerate(chat.messages)
    ]


@pytest.mark.parametrize("messages", [
    [("user", "a"), ("system", "s"), ("assistant", "b")],
    [("user", "a"), ("tool", "2"), ("assistant", "b")],
    [("user", "a"), ("assistant", "b"), ("assistant", "<think>c</think>d")],
])  # fmt: skip
def test_an_order_that_no_rule_repairs_is_refused(tmp_path: Path, messages: Any) -> None:
    with raises_user_error(where=":1"):
        list(read_chats([written(tmp_path, turns(*messages))]))


def test_what_has_no_question_is_left_out(tmp_path: Path) -> None:
    for record in ({"instruction": "", "output": "x"}, turns(("system", "s"), ("assistant", "x"))):
        with raises_user_error(what="no question before the answer: 1"):
            list(read_chats([written(tmp_path, record)], bad_records=BadRecords(max_bad_fraction=1)))


def test_an_empty_end_of_a_preference_and_of_a_prompt_is_no_repair(tmp_path: Path) -> None:
    pair = {"prompt": "Who?", "chosen": "", "rejected": "no"}
    with raises_user_error(what="an answer is empty"):
        list(read_preferences([written(tmp_path, pair)], bad_records=BadRecords(max_bad_fraction=1)))
    answered = turns(*ASKED, ("user", "And?"), ("assistant", "b"), ("assistant", "c"))
    assert words(read(tmp_path, answered, reader=read_prompts)[0][0]) == [*ASKED, ("user", "And?")]


TURN = st.tuples(st.sampled_from(["user", "assistant"]), st.sampled_from(["", "a", "b c", "<think>t</think>x"]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(TURN, min_size=1, max_size=7))
def test_repaired_turns_alternate_and_no_word_is_lost(tmp_path: Path, messages: list[tuple[str, str]]) -> None:
    counts = BadRecords(max_bad_fraction=1)
    try:
        chats = list(read_chats([written(tmp_path, turns(*messages))], bad_records=counts))
    except UserError:
        return
    assert counts.good + counts.bad + counts.left_out == counts.records == 1
    for chat in chats:
        roles = [message.role for message in chat.messages]
        assert all(a != b for a, b in itertools.pairwise(roles))
        assert all(message.content.strip() for message in chat.messages)
        learned = [m for number, m in enumerate(chat.messages) if m.role == "assistant" and m.is_target]
        assert learned and all("user" in roles[: chat.messages.index(message)] for message in learned)
        kept = " ".join(message.content for message in chat.messages)
        answered = [content for role, content in messages if role == "assistant" and content]
        assert all(content.removeprefix("<think>t</think>") in kept for content in answered)


# ------------------------------------------------------------------------------------------------ tools as text

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"name": "add", "arguments": {"a": 1}}
LISTED = json.dumps({"type": "function", "function": ADD})
HERMES = f"""You are a helper. You are provided with function signatures within <tools> </tools> XML tags.
<tools> [{LISTED}] </tools> For each call return a json object within <tool_call> </tool_call> tags:
<tool_call>
{{'arguments': <args-dict>, 'name': <function-name>}}
</tool_call>"""
QWEN = f"""You are a helper.

# Tools

You may call functions.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{LISTED}
</tools>

For each call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
GLAIVE = f"""SYSTEM: You are a helper with access to the following functions. Use them if required -
{json.dumps(ADD, indent=4)}
"""


@pytest.mark.parametrize("system", [HERMES, QWEN, GLAIVE, f"You are a helper.\nAvailable tools: [{LISTED}]"])
@pytest.mark.parametrize(
    ("call", "result"),
    [
        (
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            ("tool", "<tool_response>\n2\n</tool_response>"),
        ),
        (
            "<tool_call>\n{'arguments': {'a': 1}, 'name': 'add'}\n</tool_call> done",
            ("user", "<tool_response>2</tool_response>"),
        ),
        ("""<functioncall> {"name": "add", "arguments": '{"a": 1}'} <|endoftext|>""", ("user", "FUNCTION RESPONSE: 2")),
        ('<function_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</function_call>', ("function", "2")),
        ('<function=add>{"a": 1}</function>', ("ipython", "2")),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>', ("tool", "2")),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("tool", "2")),
    ],
)
def test_functions_calls_and_results_as_other_programs_write_them(
    tmp_path: Path, system: str, call: str, result: tuple[str, str]
) -> None:
    record = turns(("system", system), ("user", "1+1?"), ("assistant", call), result, ("assistant", "2"))
    (chat,), counts = read(tmp_path, record)
    assert chat.tools == (ADD,)
    assert [(m.role, m.content) for m in chat.messages if m.role != "assistant"] == [
        ("system", "You are a helper."), ("user", "1+1?"), ("tool", "2"),
    ]  # fmt: skip
    first, second = (message for message in chat.messages if message.role == "assistant")
    assert first.tool_calls == (CALL,) and first.content in ("", "done") and second.content == "2"
    assert counts.changed.total() == 2 and not counts.ignored


def test_the_shape_of_glaive(tmp_path: Path) -> None:
    chat_text = """USER: 1+1?


ASSISTANT: <functioncall> {"name": "add", "arguments": '{"a": 1, "why": "it's so"}'} <|endoftext|>


FUNCTION RESPONSE: {"sum": 2}


ASSISTANT: It is 2. <|endoftext|>


"""
    (chat,), _ = read(tmp_path, {"system": GLAIVE, "chat": chat_text})
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2].tool_calls == ({"name": "add", "arguments": {"a": 1, "why": "it's so"}},)
    assert chat.messages[3].content == '{"sum": 2}' and chat.messages[4].content == "It is 2."


def test_the_shape_of_xlam_and_a_trajectory_in_one_turn(tmp_path: Path) -> None:
    record = {"query": "1+1?", "tools": json.dumps([ADD]), "answers": json.dumps([CALL, CALL])}
    (chat,), _ = read(tmp_path, record)
    assert chat.messages[-1].tool_calls == (CALL, CALL) and chat.tools == (ADD,)
    text = f"Let me see. <tool_call>{json.dumps(CALL)}</tool_call><tool_response>2</tool_response>It is 2."
    (chat,), _ = read(tmp_path, turns(("user", "1+1?"), ("assistant", text)))
    assert words(chat)[1:] == [("assistant", "Let me see."), ("tool", "2"), ("assistant", "It is 2.")]


@pytest.mark.parametrize(
    "text",
    [
        f"Write <tool_call>{json.dumps(CALL)}</tool_call> to call it.",
        "<tool_call>{broken</tool_call>",
        "<tool_call>[]</tool_call>",
        "<functioncall> add(1)",
        "<function=add>x</function>",
        "[TOOL_CALLS] none",
        "<|python_tag|>print(1)",
        "<tool_response>2</tool_response>",
    ],
)
def test_what_is_no_call_stays_text_and_is_told(tmp_path: Path, text: str) -> None:
    (chat,), counts = read(tmp_path, turns(("user", "How?"), ("assistant", text)))
    assert chat.messages[-1] == Message(role="assistant", content=text) and not counts.changed
    assert counts.ignored


def test_calls_as_python_writes_them(tmp_path: Path) -> None:
    system = (
        f"You have access to the following tools:\n{json.dumps([ADD, {'name': 'Look Up', 'parameters': {}}])}. Go on."
    )
    answer = '[add(a=1), Look Up(word="it\'s (a)", many=[1, 2])]'
    (chat,), counts = read(tmp_path, turns(("system", system), ("user", "Who?"), ("assistant", answer)))
    look_up = {"name": "Look Up", "arguments": {"word": "it's (a)", "many": [1, 2]}}
    assert chat.messages[-1].tool_calls == (CALL, look_up) and counts.changed.total() == 2
    assert chat.messages[0].content == "Go on."
    for text in ("[add(1)]", "[other(a=1)]", "[add(a=b)]", "[add]", "[1, 2]", "[add(a=1)", "[add(a=1)] is what I call"):
        (chat,), _ = read(tmp_path, turns(("system", system), ("user", "Who?"), ("assistant", text)))
        assert chat.messages[-1].content == text and not chat.messages[-1].tool_calls


def test_a_result_needs_a_call(tmp_path: Path) -> None:
    pasted = turns(*ASKED, ("user", "<tool_response>2</tool_response>"), ("assistant", "What is this?"))
    assert [role for role, _ in words(read(tmp_path, pasted)[0][0])] == ["user", "assistant"] * 2


def test_numbers_are_answers_and_an_empty_list_is_no_conversation(tmp_path: Path) -> None:
    assert words(read(tmp_path, {"question": "1+1?", "answer": 2})[0][0])[-1] == ("assistant", "2")
    assert words(read(tmp_path, {"conversations": [], "question": "Who?", "answer": "Mia"})[0][0]) == ASKED
    (chat,), _ = read(tmp_path, {"question": "Who?", "options": "A. Ben\nB. Mia\n", "answer": "B"})
    assert words(chat) == [("user", QUESTION), ("assistant", "B. Mia")]


def test_a_system_message_without_functions_stays(tmp_path: Path) -> None:
    for text in (
        'You can use tools. Reply like [{"name": "x", "age": 3}]',
        "You have tools: {hammer}",
        "Use <tools>none</tools> {x}",
        'Answer with JSON: {"name": "x"}',
    ):
        (chat,), counts = read(tmp_path, turns(("system", text), *ASKED))
        assert chat.messages[0].content == text and not chat.tools and not counts.changed


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("[]{}'\":,1aN\\ \n(b#*"), max_size=60))
def test_text_that_is_almost_json_gives_a_value_or_nothing(text: str) -> None:
    value = parsed_json(text)
    assert value is None or json.loads(json.dumps(value)) == value or value != value


# ------------------------------------------------------------------------------------------------ preferences, prompts


@pytest.mark.parametrize("record", [
    {"chosen": "\n\nHuman: Who?\n\nAssistant: Mia", "rejected": "\n\nHuman: Who?\n\nAssistant: no"},
    {"prompt": "\n\nHuman: Who?\n\nAssistant:", "chosen": "Mia", "rejected": "no"},
    {"input": "Who?", "chosen": "Mia", "rejected": "no"},
    {"question": "Who?", "chosen_response": "Mia", "rejected_response": "no"},
    {"chosen": turns(*ASKED)["messages"], "rejected": turns(ASKED[0], ("assistant", "no"))["messages"]},
])  # fmt: skip
def test_shapes_of_preferences(tmp_path: Path, record: dict[str, Any]) -> None:
    for more in ({}, {"system": "Be kind."}):
        (preference,), _ = read(tmp_path, {**more, **record}, reader=read_preferences)
        start = [("system", "Be kind.")] if more else []
        assert [words(chat) for chat in preference.chats] == [[*start, *ASKED], [*start, ASKED[0], ("assistant", "no")]]
    with raises_user_error(what="preference data"):
        list(read_chats([written(tmp_path, record)]))


def test_labels_of_a_table_are_labels(tmp_path: Path) -> None:
    table = "prompt,completion,label\nWho?,Mia,True\nWho?,no,false\n"
    found, counts = read(tmp_path, table, "a.csv", reader=read_preferences)
    assert [record.is_chosen for record in found] == [(True,), (False,)] and ("label", "label") in counts.roles
    with raises_user_error(what="preference data"):
        list(read_chats([written(tmp_path, table, "a.csv")]))


@pytest.mark.parametrize("record", [
    {"prompt": "Who?", "gt": "Mia"}, {"problem": "Who?", "ground_truth": "Mia"}, {"problem": "Who?", "answer": "Mia"},
    {"question": "Who?", "reference_answer": "Mia"},
    {"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {"ground_truth": "Mia", "style": "rule"}},
])  # fmt: skip
def test_prompts_with_reference_answers(tmp_path: Path, record: dict[str, Any]) -> None:
    (prompt,), counts = read(tmp_path, record, reader=read_prompts)
    assert words(prompt) == ASKED[:1] and not counts.ignored
    assert prompt.fields.get("gt", prompt.fields.get("answer")) == "Mia"
    assert "reference" in {role for _, role in counts.roles}


# ------------------------------------------------------------------------------------------------ data.columns


def test_columns_say_what_a_field_is(tmp_path: Path) -> None:
    record = {"ask": "Who?", "why": "she is", "reply": "Mia", "answer": "not this", "id": 1}
    (chat,), counts = read(tmp_path, record, columns=("ask:question", "reply:answer"))
    assert (words(chat) == ASKED and list(counts.ignored) == ["field why", "field answer"]) or set(counts.ignored) == {
        "field why", "field answer",
    }  # fmt: skip
    assert dict(counts.roles) == {("ask", "question"): 1, ("reply", "answer"): 1}
    (chat,), _ = read(tmp_path, record, columns=("ask:question", "reply:answer", "why:reasoning"))
    assert chat.messages[-1].reasoning_content == "she is"
    assert words(read(tmp_path, {"x": turns(*ASKED)["messages"]}, columns=("x:messages",))[0][0]) == ASKED
    nested = {"text": {"ask": "Who?", "reply": "Mia"}}
    assert words(read(tmp_path, nested, columns=("text.ask:question", "text.reply:answer"))[0][0]) == ASKED
    (document,), _ = read(
        tmp_path, {"title": "T", "body": "B"}, reader=read_documents, columns=("title:text", "body:text")
    )
    assert document.text == "T\n\nB"
    (prompt,), counts = read(
        tmp_path, {"ask": "Who?", "k": "x", "kind": "name"}, reader=read_prompts, columns=("ask:question", "k:gt")
    )
    assert prompt.fields["gt"] == "x" and prompt.fields["kind"] == "name" and not counts.ignored


def test_columns_that_are_wrong(tmp_path: Path) -> None:
    for item in ("ask", "ask:", ":text", "ask:quesiton"):
        with raises_user_error(where="data.columns", got=item):
            DataSettings(columns=(item,))
    with raises_user_error(where="data.columns", got="a:text"):
        parse_columns(("a:question", "a:text"))
    path = written(tmp_path, {"b": "x"})
    with raises_user_error(where=f"{path}:1", got="the fields b", wanted="a"):
        list(read_documents([path], columns=parse_columns(("a:text",))))


def test_columns_are_part_of_a_corpus(tmp_path: Path) -> None:
    path = written(tmp_path, {"body": "B"})
    corpus = Corpus(DataSettings(train=(str(path),), columns=("body:text",)))
    assert list(corpus.texts()) == ["B"]
    assert corpus.fingerprint != Corpus(DataSettings(train=(str(path),))).fingerprint


@pytest.mark.parametrize(
    "first", [(), (Message(role="assistant", content="Hi", is_target=False),)], ids=["", "unlearned"]
)
def test_conversations_that_are_all_too_long_are_named(tmp_path: Path, first: tuple[Message, ...]) -> None:
    """Also where the part that fits has nothing to learn."""
    tokenizer = train_tokenizer(["Who is it? It is Mia."] * 3, 300)

    def chats() -> Iterator[Chat]:
        for number in range(3):
            messages = (Message(role="user", content="Who? " * (20 + number)), Message(role="assistant", content="Mia"))
            yield Chat(messages=(*first, *messages), tools=(), source="a", line=number)

    split = Split(share=0.1)
    with pytest.raises(UserError) as caught:
        prepare_chats(split.placed(chats()), tokenizer, tmp_path / "out", seq_len=32, split=split, about={})
    assert "3 conversations are longer than data.seq_len=32" in caught.value.line()
    needed = int("".join(filter(str.isdecimal, caught.value.line().split("needs")[1].split(":")[0])))
    made = prepare_chats(split.placed(chats()), tokenizer, tmp_path / "out", seq_len=needed + 20, split=split, about={})
    assert made.train.num_tokens and not made.skipped
