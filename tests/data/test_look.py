"""A first look: what is understood, what the trainer will see, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.formats import read_chats
from penjing.data.look import NUM_EXAMPLES, Group, Span, look
from penjing.data.tokenizer.tokenizer import MESSAGE_END, Tokenizer
from penjing.data.tokenizer.train import byte_tokenizer, train_tokenizer

DATA = Path(__file__).parents[2] / "../shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real files of ../shared/data are not here")
TURNS = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mia 米娅"}]
KINDS = {
    "documents": {"text": "Mia is here. 米娅在这里。"},
    "chats": {"messages": TURNS},
    "preferences": {"prompt": "Who?", "chosen": "Mia", "rejected": "Ben"},
    "prompts": {"messages": [*TURNS, {"role": "user", "content": "And?"}], "gt": "Mia"},
}


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def looked(*paths: Path, tokenizer: Tokenizer | None = None) -> tuple[list[Group], list[UserError]]:
    found = list(look(paths, tokenizer or byte_tokenizer(), {}, counts_tokens=tokenizer is not None))
    return [each for each in found if isinstance(each, Group)], [each for each in found if isinstance(each, UserError)]


def learned(spans: tuple[Span, ...]) -> str:
    return "".join(span.text for span in spans if span.learned)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_shown_with_its_mask(tmp_path: Path, kind: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[KINDS[kind]] * 5)
    (group,), errors = looked(path)
    assert (group.kind, group.problems.good, len(group.examples), errors) == (kind, 5, NUM_EXAMPLES, [])
    assert [example.line for example in group.examples] == [1, 2, 3]
    rows = {row.name: row.spans for row in group.examples[0].rows}
    wanted = {
        "documents": {"document": "Mia is here. 米娅在这里。<|endoftext|>"},
        "chats": {"chat": f"Mia 米娅{MESSAGE_END}"},
        "preferences": {"prompt": "", "chosen": f"Mia{MESSAGE_END}", "rejected": f"Ben{MESSAGE_END}"},
        "prompts": {"prompt": ""},
    }[kind]
    assert {name: learned(spans) for name, spans in rows.items()} == wanted
    assert group.as_json()["records"] == {"good": 5, "bad": 0, "left_out": 0}
    assert json.loads(json.dumps(group.as_json()))["kind"] == kind


def test_the_spans_are_what_the_trainer_encodes(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", KINDS["chats"])
    tokenizer = train_tokenizer(["Who? Mia 米娅 is here"] * 9, 300)
    (group,), _ = looked(path, tokenizer=tokenizer)
    (chat,) = read_chats([path])
    encoded = render(tokenizer, chat.messages, chat.tools)
    (spans,) = [row.spans for row in group.examples[0].rows]
    assert "".join(span.text for span in spans) == tokenizer.decode(encoded.ids, hide=False)
    assert [span.text for span in spans if span.special] == ["<|im_start|>", MESSAGE_END] * 2
    assert abs(group.tokens - sum(map(len, tokenizer.encode_many(["Who?", "Mia 米娅"])))) <= 1


def test_what_is_read_changed_ignored_and_refused_is_told(tmp_path: Path) -> None:
    first = {"instruction": "Who?", "context": "Mia is here.", "response": "Mia", "score": 3}
    greeted = {"messages": [{"role": "assistant", "content": "Hi"}, *KINDS["chats"]["messages"]]}
    path = jsonl(
        tmp_path / "a.jsonl", first, greeted, {"riddle": 1}, {"riddle": 2}, "{cut\n", {**first, "response": ""}
    )
    (group,), _ = looked(path)
    found = group.as_json()
    assert found["records"] == {"good": 2, "bad": 3, "left_out": 1}
    assert {(field["field"], field["read_as"]) for field in found["fields"]} == {
        ("instruction", "question"), ("context", "question"), ("response", "answer"), ("messages", "messages"),
    }  # fmt: skip
    assert list(found["changed"].values()) == [1] and found["not_learned"][0]["what"] == "field score"
    assert [(p["line"], p["kind"], p["records"]) for p in found["problems"]] == [
        (3, "bad", 2), (5, "bad", 1), (6, "left out", 1),
    ]  # fmt: skip
    assert all(problem["file"] == str(path) for problem in found["problems"])


def test_files_are_grouped_by_what_they_hold(tmp_path: Path) -> None:
    for number, row in enumerate([KINDS["documents"], KINDS["documents"], KINDS["chats"], {"q": "a", "a": "b"}]):
        jsonl(tmp_path / f"{number}.jsonl", row)
    (tmp_path / "a.txt").write_text("plain text")
    (tmp_path / "b.jsonl").write_text("{broken")
    jsonl(tmp_path / "c.jsonl", {"riddle": "a"})
    groups, errors = looked(tmp_path)
    assert sorted((group.kind, len(group.files)) for group in groups) == [
        ("chats", 1), ("chats", 1), ("documents", 1), ("documents", 2),
    ]  # fmt: skip
    assert sorted(Path(str(error.where).rpartition(":")[0]).name for error in errors) == ["b.jsonl", "c.jsonl"]


def test_scripts_and_tokens_of_every_kind(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "米娅" * 40}, {"role": "assistant", "content": "abcd" * 20}]}
    (group,), _ = looked(jsonl(tmp_path / "a.jsonl", row))
    assert group.stats.scripts["Han"] == group.stats.scripts["Latin"] == 0.5
    assert group.tokens == 50 + 20
    (group,), _ = looked(jsonl(tmp_path / "b.jsonl", {"text": "ひらがな 한국어 Привет"}))
    assert {name for name, share in group.stats.scripts.items() if share} == {"Kana", "Hangul", "Cyrillic"}


def test_long_texts_are_cut_and_equal_starts_are_no_error(tmp_path: Path) -> None:
    long = "word " * 50_000
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "chosen": long + "b", "rejected": long + "c"})
    (group,), _ = looked(path)
    assert group.examples[0].cut and group.problems.good == 1
    (group,), _ = looked(jsonl(tmp_path / "b.jsonl", {"text": long}))
    assert group.examples[0].cut and sum(len(span.text) for row in group.examples[0].rows for span in row.spans) < 3000


def test_a_damaged_file_is_shown_up_to_the_damage(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": os.urandom(40).hex()}) + "\n" for _ in range(400))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(rows.encode())[:10_000])
    (group,), _ = looked(path)
    assert group.problems.good > 10 and group.problems.bad == 1 and not group.as_json()["read_to_the_end"]


def test_nothing_that_is_understood(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"riddle": "a"})
    groups, (error,) = looked(path)
    assert not groups and error.next_step is not None and "data.columns" in error.next_step
    with raises_user_error(where="gone"):
        looked(tmp_path / "gone")


CHATS = [
    "sft/alpaca_zh_demo.json",
    "sft/firefly_dummy.jsonl",
    "sft/glaive_toolcall_en_demo.json",
    "math/gsm8k_test.jsonl",
    "eval/arc_easy.jsonl",
    "eval/cmmlu/dev/anatomy.csv",
]


@needs_data
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(name, "chats") for name in CHATS],
        ("pref/kto_en_demo.json", "preferences"),
        ("pref/firefly_dummy_dpo.jsonl", "preferences"),
        ("pretrain_en/c4_demo.jsonl", "documents"),
        ("pretrain_zh/classics/lunyu.json", "documents"),
    ],
)
def test_real_files(name: str, kind: Any) -> None:
    (group,), _ = looked(DATA / name)
    assert group.kind == kind and group.problems.bad == 0 and len(group.examples) == NUM_EXAMPLES
    rows = [row.spans for example in group.examples for row in example.rows]
    assert rows and any(map(learned, rows))
