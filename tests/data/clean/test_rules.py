"""What the cleaning rules change and leave out, and that every record is counted once."""

import json
import unicodedata
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.base.errors import UserError
from penjing.data.clean.pipeline import Pipeline
from penjing.data.clean.unicode import Unicode
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats import Document


def corpus(folder, rows, *rules, kind="documents", **settings):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return Corpus(DataSettings(train=(str(path),), format=kind, clean=rules, **settings))


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("e\u0301te\u0301", "été"),
        ("a\u200bb\ufeffc\xad d\u2060", "abc d"),
        ("one\r\ntwo\rthree\u2028four\x85five", "one\ntwo\nthree\nfour\nfive"),
        ("bell\x07 \x1b[0m\x9b", "bell [0m"),
        ("\tindent\n\n👨\u200d👩\u200d👧 می\u200cخواهم", "\tindent\n\n👨\u200d👩\u200d👧 می\u200cخواهم"),
        ("“你好，”他说。Ａ１", "“你好，”他说。Ａ１"),
    ],
)
def test_unicode(dirty, clean):
    assert Unicode().text(dirty) == clean
    assert Unicode().text(clean) == clean


@given(st.text())
def test_unicode_is_done_after_one_pass_and_keeps_what_is_seen(text):
    once = Unicode().text(text)
    assert Unicode().text(once) == once and unicodedata.is_normalized("NFC", once)


@pytest.mark.parametrize("name", ["language", "mojibake", "simplified"])
def test_a_rule_without_its_package_says_which_extra_has_it(monkeypatch, name):
    monkeypatch.setattr("penjing.data.clean.rule.find_spec", lambda package: None)
    with pytest.raises(UserError) as raised:
        Pipeline({name: {}}).make_rules()
    assert "penjing[data]" in str(raised.value.next_step)


def test_records_are_counted_once_whatever_a_rule_does(tmp_path):
    rows = [{"text": "a<|endoftext|>b"}, {"text": "b"}, {"text": "\u200b"}, {"text": "c\x00".strip("\x00") + "\u200b"},
            {"text": ""}, {"no": "text"}, {"text": "a<|endoftext|>b"}]  # fmt: skip
    made = corpus(tmp_path, rows, "unicode", "exact_duplicates", max_bad_fraction=1)
    counts = made.counts(tmp_path / "bad.jsonl")
    assert [document.text for document in made.records(counts)] == ["a", "b", "c"]
    assert (counts.good, counts.left_out, counts.bad) == (2, 4, 1)
    assert counts.changed["unicode"] == 2
    kinds = [
        (line["line"], line["kind"]) for line in map(json.loads, (tmp_path / "bad.jsonl").read_text().splitlines())
    ]
    assert kinds == [(2, "left out"), (3, "left out"), (5, "left out"), (6, "bad"), (7, "left out")]
    assert "unicode: 2" in counts.note() and "exact_duplicates: equals an earlier record: 3" in counts.note()


def test_rules_run_in_the_order_given(tmp_path):
    rows = [{"text": "a"}, {"text": "a\u200b"}, {"text": "b"}]
    for rules, kept in (
        (("unicode", "exact_duplicates"), ["a", "b"]),
        (("exact_duplicates", "unicode"), ["a", "a", "b"]),
    ):
        made = corpus(tmp_path, rows, *rules)
        assert [document.text for document in made.records(made.counts())] == kept


def test_an_answer_without_a_character_left_is_left_out(tmp_path):
    rows = [{"prompt": f"say {answer!r}", "response": answer} for answer in ("x", "\u200b", "e\u0301")]
    made = corpus(tmp_path, rows, "unicode", kind="chats")
    counts = made.counts()
    assert [chat.messages[-1].content for chat in made.records(counts)] == ["x", "é"]
    assert counts.reasons == {"an answer is empty": 1}


def test_each_pass_forgets_the_one_before(tmp_path):
    made = corpus(tmp_path, [{"text": "a"}, {"text": "b"}, {"text": "a"}], "exact_duplicates", val_fraction=0.5)
    assert list(made.texts()) == list(made.texts()) == ["a", "b"]
    assert sorted([*made.texts(held_out=True), *made.texts(held_out=False)]) == ["a", "b"]


def test_the_fingerprint_knows_contents_and_rules_but_no_names(tmp_path):
    (tmp_path / "other").mkdir()
    rows = [{"text": "a"}]
    plain = corpus(tmp_path, rows).fingerprint
    assert corpus(tmp_path / "other", rows).fingerprint == plain and "clean" not in plain
    assert corpus(tmp_path, rows, "unicode").fingerprint == {**plain, "clean": ["unicode"]}
    assert corpus(tmp_path, [{"text": "b"}]).fingerprint["source"] != plain["source"]


def test_an_unknown_rule_names_the_nearest():
    with pytest.raises(UserError, match="exact_duplicates"):
        Pipeline.load(["exact_duplicate"])
    same = Document(text="a", source="", line=1)
    assert Pipeline.load(["unicode"]).make(Counter())(same) == same
