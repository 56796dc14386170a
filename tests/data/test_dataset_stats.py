"""The report on a corpus: hand-counted figures, and a warning in words for each thing that goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.data.dataset_stats import STATS, ChatStats, DocumentStats, Stats, quantiles
from penjing.data.formats import READERS, BadRecords, Chat, Document, Kind, Message, read_chats, read_documents, sniff

DATA = Path(__file__).parents[2] / "../shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real files of ../shared/data are not here")


def documents(*texts: str) -> list[Document]:
    return [Document(text=text, source="a.txt", line=number) for number, text in enumerate(texts, 1)]


def test_hand_counted() -> None:
    found = DocumentStats().count(documents("ab 12", "中文。\n字", "ab 12"))
    assert (found.num_records, found.characters.total()) == (3, 15)
    assert found.num_bytes == 5 + 13 + 5
    visible = 12  # abab 1212 中文字 。
    assert {name: pytest.approx(share * visible) for name, share in found.scripts.items() if share} == {
        "Latin": 4,
        "Han": 3,
        "digits": 4,
        "other": 1,
    }
    assert found.num_duplicates == 1
    assert quantiles(found.lengths["document, bytes"]) == {
        "min": 5,
        "p5": 5,
        "p25": 5,
        "p50": 5,
        "p75": 5,
        "p95": 5,
        "max": 13,
    }
    assert len(found.characters) == 10


def test_no_text() -> None:
    found = DocumentStats().count([])
    assert found.warnings == ["There is no text at all."]
    assert quantiles(found.lengths["document, bytes"])["p50"] == 0 and set(found.scripts.values()) == {0}


def test_quantiles_are_observed_values() -> None:
    assert quantiles(range(100, -1, -1)) == {
        "min": 0, "p5": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "max": 100,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (
            ["same text, again and again, fifty bytes and more."] * 7 + [f"{i} " * 40 for i in range(93)],
            "6 % of documents are exact duplicates: a model memorizes them",
        ),
        ([f"{i}" for i in range(100)], "Half of the documents are 2 bytes or less"),
        ([f"{i} " * 40 for i in range(3)], "Only 3 documents: too few to hold some out"),
        ([f"{i} " * 40 for i in range(50)] + ["x y " * 9000], "One document is 87 % of all bytes"),
        (["one\r\ntwo", "three \ufffd\ufffd", "\x1b[31m red"], "2 replacement characters"),
        (["one\r\ntwo", "three \ufffd\ufffd", "\x1b[31m red"], "1 control characters"),
        (["one\r\ntwo", "three \ufffd\ufffd", "\x1b[31m red"], "1 carriage returns"),
        (["\u3000\u3000话说天下大势"], "2 full-width spaces"),
        (["hello"], "Only 0.00 MB of text"),
    ],
)  # fmt: skip
def test_warnings(texts: list[str], words: str) -> None:
    assert any(words in warning for warning in DocumentStats().count(documents(*texts)).warnings)


def test_a_sound_corpus_has_no_warning() -> None:
    texts = [" ".join(f"{i}-{j}" for j in range(2000)) + "." for i in range(100)]
    assert DocumentStats().count(documents(*texts)).warnings == []


def chat(*turns: tuple[str, str], tools: bool = False) -> Chat:
    messages = tuple(Message(role=role, content=content) for role, content in turns)
    return Chat(messages=messages, tools=({"name": "f"},) if tools else (), source="a", line=1)


def test_chats_hand_counted() -> None:
    call = Message(role="assistant", content="", reasoning_content="hm", tool_calls=({"name": "f", "arguments": {}},))
    chats = [
        chat(("system", "s"), ("user", "a"), ("assistant", "答案"), tools=True),
        chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dd")),
        chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dd")),
        chat(("user", "a"), ("assistant", "hello"), ("user", "a")),
        Chat(messages=(Message(role="user", content="a"), call), tools=(), source="a", line=1),
    ]
    found = ChatStats().count(chats)
    turns, answers = (found.lengths[name] for name in ("conversation, messages", "answer, bytes"))
    assert (found.num_records, len(answers), sum(answers)) == (5, 7, 19)
    assert found.tables["messages by role"] == {"user": 8, "assistant": 7, "system": 1}
    assert quantiles(turns)["p50"] == 3 and quantiles(turns)["max"] == 4
    assert dict(found.counts) == {
        "tool calls": 1, "with reasoning": 1, "with a system message": 1, "with tools": 1,
        "without an answer at the end": 1,
    }  # fmt: skip
    rows = dict(found.rows())
    assert (rows["messages by role"], rows["tool calls"]) == ("user 8, assistant 7, system 1", "1")
    assert found.num_duplicates == 1
    assert found.warnings == [
        "20 % of chats are exact duplicates: a model memorizes them.",
        "20 % of chats end on a turn that is never answered.",
    ]
    assert ChatStats().count([]).warnings == ["There is no chat at all."]
    assert "one question and one answer" in ChatStats().count([chat(("user", "a"), ("assistant", "b"))]).warnings[0]


def jsonl(path: Path, *rows: object) -> Path:
    """A file of rows; one of text stands in it as it is."""
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def compute_stats(path: Path, kind: Kind) -> Stats:
    bad_records = BadRecords(max_bad_fraction=1.0)
    return STATS[kind](bad_records).count(READERS[kind]([path], bad_records=bad_records))


def turns(*contents: str, first: str = "user") -> dict[str, object]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def test_what_the_reader_sets_aside_is_counted(tmp_path: Path) -> None:
    texts: list[object] = [{"text": f"{i} " * 40} for i in range(96)]
    path = jsonl(tmp_path / "a.jsonl", *texts, {"text": ""}, {"text": " \n"}, '{"text": "cut\n', {"text": 3})
    found = compute_stats(path, "documents")
    assert (found.num_records, found.bad_records.bad, found.bad_records.reasons) == (96, 2, {"the text is empty": 2})
    assert "2 % of documents are left out: the text is empty." in found.warnings
    broken = f"2 of 100 records are broken, too many to train on as they are; the first: {path}:99: broken JSON"
    assert found.warnings[-1].startswith(broken)
    path = jsonl(tmp_path / "c.json", '[{"text": "a"}, {"text": "b"}, {"text": "cut\n')
    assert (
        f"Not read to the end, since damage hides where records begin: {path}:1."
        in compute_stats(path, "documents").warnings
    )
    path = jsonl(tmp_path / "b.jsonl", turns("a", "b"), turns("a", ""), {"riddle": "a"})
    found = compute_stats(path, "chats")
    assert (found.num_records, found.bad_records.bad, found.bad_records.reasons) == (1, 1, {"an answer is empty": 1})
    assert "33 % of chats are left out: an answer is empty." in found.warnings


ENDS = {"prompt, bytes": (1, 3), "chosen, bytes": (1, 6), "rejected, bytes": (1, 2)}


def test_preferences_hand_counted(tmp_path: Path) -> None:
    longer = {"prompt": "a", "chosen": "bb", "rejected": "c"}
    path = jsonl(
        tmp_path / "a.jsonl",
        longer,
        longer,
        {"prompt": "aaa", "chosen": "b", "rejected": "cc"},
        {"prompt": "a", "chosen": "same", "rejected": "same"},
        {"prompt": "a", "completion": "字字", "label": True},
        {"prompt": "a"},
    )
    found = compute_stats(path, "preferences")
    assert (found.counts["pairs"], found.num_records, found.bad_records.bad, found.num_duplicates) == (3, 4, 1, 1)
    assert found.bad_records.reasons == {"both answers are the same": 1}
    assert found.counts["pairs whose chosen answer is longer"] == 2
    assert {name: (min(each), max(each)) for name, each in found.lengths.items()} == ENDS
    assert found.num_bytes == 2 * 4 + 6 + 7, "a prompt counts once for both answers"
    assert found.warnings[:2] == [
        "25 % of records are exact duplicates: a model memorizes them.",
        "17 % of records are left out: both answers are the same.",
    ]
    biased = compute_stats(jsonl(tmp_path / "b.jsonl", longer), "preferences")
    assert "The chosen answer is the longer one in 100 % of pairs: a model may learn to be long." in biased.warnings


def test_prompts_hand_counted(tmp_path: Path) -> None:
    asked, again = turns("2+2") | {"answer": "4"}, turns("a", "b", "ccc", "") | {"gt": ["x"]}
    path = jsonl(tmp_path / "a.jsonl", asked, asked, again, '{"cut\n')
    found = compute_stats(path, "prompts")
    assert (found.num_records, found.bad_records.bad, found.num_duplicates) == (3, 1, 1)
    assert found.tables["other fields"] == {"answer": 2, "gt": 1}
    sizes = found.lengths["prompt, bytes"]
    assert (max(found.lengths["prompt, messages"]), min(sizes), max(sizes)) == (3, 3, 5)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([turns("a", "b", "c"), turns("a"), turns("a", "b")], "chats"),
        ([turns("a", "b", "c"), '{"cut\n', turns("a")], "prompts"),
        ([turns("a", "") | {"gt": ["x"]}, turns("a", "b", "c", ""), turns("a", "none") | {"gt": ["x"]}], "prompts"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "preferences"),
        ([{"text": "a"}, turns("a", "b")], "documents"),
        ([{"messages": []}, {"note": "of the file"}, turns("a", "b")], "chats"),
    ],
)
def test_the_kind_is_that_of_the_first_known_record_and_chats_may_begin_with_prompts(
    tmp_path: Path, rows: list[object], kind: str
) -> None:
    assert sniff(jsonl(tmp_path / "a.jsonl", *rows)) == kind


@needs_data
def test_real_files() -> None:
    poems = DocumentStats().count(read_documents([DATA / "pretrain_zh/songci.jsonl"]))
    assert (poems.num_records, poems.num_duplicates, len(poems.characters)) == (21_050, 4, 6099)
    assert poems.scripts["Han"] > 0.83
    stories = DocumentStats().count(read_documents([DATA / "pretrain_en/tinystories_a.txt"]))
    assert stories.warnings == [] and stories.scripts["Latin"] > 0.94
    dialogues = ChatStats().count(read_chats([DATA / "sft/crosswoz_val_minimind.jsonl"]))
    turns, answers = dialogues.lengths.values()
    assert (dialogues.num_records, len(answers), max(turns)) == (500, 4229, 46)
