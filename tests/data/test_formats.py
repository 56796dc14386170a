"""Readers: every shape that people have, and errors that name the line, the field, what was got and what was wanted."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.formats import (
    BadRecords,
    Chat,
    Message,
    NoBadRecords,
    UncheckedRecords,
    files,
    json_values,
    list_files,
    read_chats,
    read_documents,
    read_preferences,
    read_prompts,
    sniff,
)
from penjing.data.formats.dispatch import rows_of

DATA = Path(__file__).parents[2] / "../shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real files of ../shared/data are not here")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def jsonl(path: Path, *rows: object) -> Path:
    return write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def texts(path: Path, **options: Any) -> list[str]:
    return [document.text for document in read_documents([path], **options)]


def one_chat(tmp_path: Path, record: dict[str, Any]) -> Chat:
    (chat,) = read_chats([jsonl(tmp_path / "one.jsonl", record)])
    return chat


def roles_and_words(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


def error_of(path: Path, read: Any = read_documents) -> UserError:
    with pytest.raises(UserError) as caught:
        list(read([path]))
    assert "\n" not in str(caught.value)
    return caught.value


# ------------------------------------------------------------------------------------------------------------ documents


def test_text_parted_by_separator_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\nOne day.\n\nShe ran.\n<|endoftext|>\nTwo.\n<|endoftext|>\n\n<|endoftext|>\n")
    bad_records = BadRecords(path=tmp_path / "bad_records.jsonl")
    found = list(read_documents([path], bad_records=bad_records))
    assert [(d.text, d.line) for d in found] == [("One day.\n\nShe ran.", 2), ("Two.", 6)]
    (left_out,) = map(json.loads, bad_records.path.read_text().splitlines())
    assert left_out == {"file": str(path), "line": 8, "kind": "left out", "reason": "the text is empty"}
    assert found[0].source == str(path)


def test_text_without_separators_is_cut_between_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = [f"Line {i} " + "word " * (i % 40) for i in range(500)]
    lines = [line.rstrip() if i % 7 else "" for i, line in enumerate(lines)]
    found = list(read_documents([write(tmp_path / "novel.txt", "\n".join(lines))]))
    assert len(found) > 10
    kept = [line for document in found for line in document.text.split("\n") if line]
    assert kept == [line for line in lines if line]
    assert all(2000 <= len(document.text) + 60 < 3300 for document in found[:-1])
    for document in found:
        assert lines[document.line - 1] == document.text.split("\n")[0]


def test_lines_without_blanks_are_cut_too_and_a_long_line_stays_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "names.txt", "emma\n" * 1000 + "x" * 9000 + "\nend\n")
    found = texts(path)
    assert "\n".join(found).split("\n") == ["emma"] * 1000 + ["x" * 9000, "end"]
    assert max(len(text) for text in found if "x" not in text) <= 3005


def test_novel_is_normalised(tmp_path: Path) -> None:
    raw = "\ufeff第一回\r\n\r\n\u3000\u3000话说天下大势\u3000\r\n    \u3000分久必合  \r\n"
    raw += "    滚滚长江\r\n    code stays\r\n"
    assert texts(write(tmp_path / "a.txt", raw)) == ["第一回\n\n话说天下大势\n分久必合\n滚滚长江\n    code stays"]
    assert texts(write(tmp_path / "mac.txt", "one\rtwo\r")) == ["one\ntwo"]


def test_python_file_is_one_document_and_keeps_its_spaces(tmp_path: Path) -> None:
    code = "def f():\n    x = '中'  \n\n\n    return x\n" * 200
    assert texts(write(tmp_path / "a.py", code)) == [code]


def test_fields_of_records(tmp_path: Path) -> None:
    assert texts(jsonl(tmp_path / "a.jsonl", {"text": " a\r\n", "content": "no"}, {"content": "b"})) == [" a\r\n", "b"]
    assert texts(jsonl(tmp_path / "b.jsonl", {"raw_content": "c", "text": "d"})) == ["d"]
    assert texts(write(tmp_path / "c.jsonl", '\ufeff\n{"text": "a"}\n\n  \n{"text": "b"}')) == ["a", "b"]


@pytest.mark.parametrize("indent", [None, 1])
def test_json_array_lines_and_single_object(tmp_path: Path, indent: int | None) -> None:
    rows = [{"text": f'第{i}行 "quoted" \\ \u2028'} for i in range(5)]
    wanted = [row["text"] for row in rows]
    assert texts(write(tmp_path / "a.json", json.dumps(rows, indent=indent))) == wanted
    assert texts(write(tmp_path / "b.json", "\ufeff" + json.dumps(rows, ensure_ascii=False, indent=indent))) == wanted
    assert texts(write(tmp_path / "c.jsonl", json.dumps(rows, indent=indent))) == wanted
    assert texts(write(tmp_path / "d.json", "\n".join(json.dumps(row) for row in rows))) == wanted
    assert texts(write(tmp_path / "e.json", json.dumps(rows[0], indent=indent))) == wanted[:1]
    assert texts(write(tmp_path / "f.json", "\n".join(json.dumps(row, indent=indent) for row in rows))) == wanted


def test_json_array_across_blocks_has_right_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "汉字" * i + '\\" é', "n": -1.5e10, "b": [True, None, {"x": "\u00e9"}]} for i in range(30)]
    content = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=bool(i % 2)) for i, row in enumerate(rows)) + "\n]\n"
    path = write(tmp_path / "a.json", content)
    for size in (1, 2, 7, 64, 1000):
        monkeypatch.setattr(files, "BLOCK_BYTES", size)
        found = list(read_documents([path]))
        assert [(d.text, d.line) for d in found] == [(row["text"], i + 2) for i, row in enumerate(rows)]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.json.gz", "a.csv.gz"])
def test_gzip(tmp_path: Path, name: str) -> None:
    content = {"jsonl": '{"text": "你好"}\n', "txt": "你好\n", "json": '[{"text": "你好"}]', "csv": "text\n你好\n"}
    path = write(tmp_path / name, gzip.compress(content[name.split(".")[1]].encode()))
    assert texts(path) == ["你好"]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_tables(tmp_path: Path, name: str, delimiter: str) -> None:
    path = tmp_path / name
    long = "x" * 200_000
    with open(path, "w", encoding="utf-8-sig", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows(
            [["id", "text"], [1, 'a "b",\tc'], [2, "two\nlines"], [3, long]]
        )
    assert [(d.text, d.line) for d in read_documents([path])] == [('a "b",\tc', 2), ("two\nlines", 3), (long, 5)]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_table_whose_first_row_is_a_record_has_numbers_as_names(tmp_path: Path, name: str, delimiter: str) -> None:
    rows = [["title", "long " * 21], ["title", "short"]]
    path = write(tmp_path / name, "".join(delimiter.join(row) + "\n" for row in rows))
    found = [(document.text, document.line) for document in read_documents([path], columns={"2": "text"})]
    assert found == [("long " * 21, 1), ("short", 2)]
    assert "fields 1, 2;" in error_of(path).line()


def test_a_quotation_mark_in_a_tsv_is_a_character(tmp_path: Path) -> None:
    rows = ['"外部性"是问题', '"open', 'says "x"', '"whole"', 'end"', '"two\n\nlines ""x"""', '"', '"a"b"', "last"]
    path = write(tmp_path / "a.tsv", "id\ttext\n" + "".join(f"{i}\t{row}\n" for i, row in enumerate(rows)))
    wanted = ['"外部性"是问题', '"open', 'says "x"', "whole", 'end"', 'two\n\nlines "x"', '"', '"a"b"', "last"]
    found = list(read_documents([path]))
    assert [document.text for document in found] == wanted
    assert [document.line for document in found] == [2, 3, 4, 5, 6, 7, 10, 11, 12]
    assert texts(write(tmp_path / "b.tsv", 'text\n"open\nb\n')) == ['"open', "b"]
    assert texts(write(tmp_path / "c.tsv", '"text"\tid\n"a\tb"\t1\n"c\nd"\t2\n')) == ["a\tb", "c\nd"]
    assert ":3: a row of another width" in error_of(write(tmp_path / "d.tsv", 'text\tid\na\t1\n"b\nc\t2\n')).line()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_bad_byte_inside_a_quoted_field_costs_its_row(tmp_path: Path, name: str) -> None:
    raw = b'id,text\n1,"one\ncaf\xe9\n2,not a row"\n3,caf\xe9\n4,b\n'
    tabs = raw.replace(b"2,not", b"2 not").replace(b",", b"\t")  # a line with all fields would be a row of its own
    path = write(tmp_path / name, tabs if name == "a.tsv" else raw)
    bad_records = BadRecords(max_bad_fraction=0.9)
    assert [document.text for document in read_documents([path], bad_records=bad_records)] == ["b"]
    assert (bad_records.good, bad_records.bad) == (1, 2)


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_column_with_the_name_of_another_is_not_lost(tmp_path: Path, name: str, delimiter: str) -> None:
    path = write(tmp_path / name, "text,text\nread,more\n".replace(",", delimiter))
    bad_records = UncheckedRecords()
    assert texts(path, bad_records=bad_records) == ["read"] and list(bad_records.ignored) == ["field text.1"]
    assert texts(path, columns={"text.1": "text"}) == ["more"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["a", None, "c"]}), path)
    assert [(d.text, d.line) for d in read_documents([path])] == [("a", 1), ("c", 3)]
    turns = [[{"role": "user", "content": "hi", "tools": None}, {"role": "assistant", "content": "yo", "tools": None}]]
    parquet.write_table(pyarrow.table({"conversations": turns}), path)
    (chat,) = read_chats([path])
    assert roles_and_words(chat) == [("user", "hi"), ("assistant", "yo")]
    wanted = (
        f"{path}:1: no field text; got the fields conversations; wanted text or content or raw_content or paragraphs."
    )
    assert error_of(path).line() == f"{wanted} This looks like chats, not documents: data.format=chats."
    assert "broken parquet" in error_of(write(tmp_path / "b.parquet", b"PAR1 nonsense")).line()
    parquet.write_table(pyarrow.Table.from_arrays([["one"], ["two"]], names=["text", "text"]), path)
    assert [record for _, record in rows_of(path)] == [{"text": "one", "text.1": "two"}]
    parquet.write_table(pyarrow.table({"text": [b"raw"]}), path)
    with raises_user_error(got="bytes", wanted="text"):
        sniff(path)


def test_an_arrow_file(tmp_path: Path) -> None:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = pyarrow.table({"text": [f"text {number}" for number in range(700)]})
    with ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=300)
    assert texts(tmp_path / "a.arrow") == table["text"].to_pylist()


def test_reading_is_lazy(tmp_path: Path) -> None:
    good = '{"text": "a"}\n' * 3
    for name, content in [
        ("a.jsonl", good + "{broken"),
        ("a.json", '[{"text": "a"},{"text": "a"},{"text": "a"}, {broken'),
    ]:
        documents = read_documents([write(tmp_path / name, content)])
        assert [next(documents).text for _ in range(3)] == ["a"] * 3
        with pytest.raises(UserError, match="broken JSON"):
            next(documents)


def test_a_long_array_is_not_held_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", "[" + ",".join(['{"text": "' + "x" * 1000 + '"}'] * 3000) + "]")
    stream = json_values.JsonStream(path)
    largest = 0
    num_values = 0
    for _ in stream.values():
        num_values += 1
        largest = max(largest, len(stream.buffer))
    assert num_values == 3000
    assert largest < 3 * files.BLOCK_BYTES < path.stat().st_size


# ---------------------------------------------------------------------------------------------------------------- files


def test_list_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", "deep/c.csv", "README.md", "LICENSE.txt", "SOURCE.json", "x.bin", ".hid/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "x")
    with pytest.warns(UserWarning, match=r"not read: \.bin \(1\)$"):
        assert list_files([tmp_path]) == [tmp_path / name for name in ("a.txt", "b.jsonl", "deep/c.csv")]
    assert list_files([tmp_path / "README.md"]) == [tmp_path / "README.md"]  # named outright, it is meant
    (tmp_path / "empty").mkdir()
    for path, facts in [("gone", {}), ("empty", {"wanted": ".jsonl"}), ("x.bin", {"got": ".bin", "wanted": ".jsonl"})]:
        with raises_user_error(where=path, **facts):
            list_files([tmp_path / path])
    with raises_user_error(wanted="at least one file or folder"):
        list_files([])


def test_an_empty_file_among_others_is_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.md", "A diary.")
    write(tmp_path / "b.md", "")
    write(tmp_path / "c.jsonl", "\n")
    bad_records = BadRecords()
    assert [document.text for document in read_documents([tmp_path], bad_records=bad_records)] == ["A diary."]
    assert (bad_records.bad, bad_records.left_out) == (0, 2)
    assert bad_records.reasons == {"the file is empty": 1, "the file has only blank lines": 1}
    with raises_user_error(where="b.md"):
        list(read_documents([tmp_path]))


@pytest.mark.parametrize("mark", [";", "\t"])
def test_tables_of_spreadsheets_without_commas_between_fields(tmp_path: Path, mark: str) -> None:
    rows = [["question", "answer"], ["One, two; and?", "three"]]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as stream:
        csv.writer(stream, delimiter=mark, quoting=csv.QUOTE_ALL).writerows(rows)
    (chat,) = read_chats([tmp_path / "a.csv"])
    assert [message.content for message in chat.messages] == ["One, two; and?", "three"]


def test_what_a_folder_holds_beside_data_is_told_by_its_endings(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.xz", "c.jsonl.xz", "d.parquet.gz", "e.text", "sums", ".f.xz", "README.rst"):
        write(tmp_path / name, "{}")
    told = f"{tmp_path}: files of unknown formats are not read: .jsonl.xz (2), .parquet.gz (1), .text (1), no suffix"
    with pytest.warns(UserWarning, match=re.escape(told)):
        assert list_files([tmp_path]) == [tmp_path / "a.jsonl"]


def test_files_that_give_nothing(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.json", "a.csv"):
        assert "the file is empty" in error_of(write(tmp_path / name, "")).line()
        assert "only blank lines" in error_of(write(tmp_path / name, "\ufeff\n \n")).line()
    assert "no record" in error_of(write(tmp_path / "a.json", "[ ]")).line()
    assert "no record" in error_of(write(tmp_path / "a.csv", "text\n")).line()
    path = jsonl(tmp_path / "c.jsonl", *[{"prompt": "a", "chosen": "b", "rejected": "c"}] * 5, {"text": 3})
    with pytest.raises(UserError) as caught:
        list(read_documents([path], bad_records=BadRecords(max_bad_fraction=1.0)))
    assert caught.value.line().startswith(f"no usable record: 6 broken: {path}:1: no field text")
    assert f"{path}:6" in caught.value.line() and f"{path}:2" not in caught.value.line(), "each kind once"
    path = jsonl(tmp_path / "b.jsonl", {"text": ""}, {"text": None}, {"text": " \n"})
    assert error_of(path).line() == f"{path}: no usable record: all 3 are left out, line 1: the text is empty"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    path.chmod(0)
    assert "cannot be read" in error_of(path).line()


def test_truncated_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(5000).hex().encode() + b"\n")
    assert "broken gzip" in error_of(write(tmp_path / "a.txt.gz", packed[:2000])).line()
    assert "broken gzip" in error_of(write(tmp_path / "b.txt.gz", b"plain text")).line()


def damaged(path: Path) -> Path:
    """Three records, or fewer, then damage, then many more."""
    rows = [json.dumps({"text": os.urandom(40).hex()}) for _ in range(400)]
    if path.name == "a.json":
        return write(path, "[" + ",\n".join([*rows[:3], "{broken", *rows[3:]]) + "]")
    if path.name == "a.jsonl.gz":
        return write(path, gzip.compress("\n".join(rows).encode())[:10_000])
    if path.name == "a.txt.gz":  # a line that is not text stands before the damage, in one document with it
        return write(path, gzip.compress(b"caf\xe9\n" + os.urandom(900).hex().encode())[:700])
    if path.name == "a.csv":
        return write(path, 'text\none\ntwo\nthree\n"open\n' + "more\n" * 400)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": rows}), path)
    return write(path, path.read_bytes()[:-20])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.txt.gz", "a.csv", "a.parquet", "b.jsonl.gz"])
def test_a_file_that_breaks_off_stops_the_reading_unless_all_may_be_broken(tmp_path: Path, name: str) -> None:
    good = jsonl(tmp_path / "good.jsonl", *[{"text": "a"}] * 5000)
    path = write(tmp_path / name, "no archive") if name == "b.jsonl.gz" else damaged(tmp_path / name)
    for max_bad_fraction in (0.01, 0.99):
        bad_records = BadRecords(max_bad_fraction, tmp_path / "bad_records.jsonl")
        with pytest.raises(UserError) as caught:
            list(read_documents([good, path], bad_records=bad_records))
        line = caught.value.line()
        assert line.startswith(str(path)) and "nothing after it in the file can be read" in line
        assert "data.max_bad_fraction=1." in line
        assert "what follows in the file is not read" in (tmp_path / "bad_records.jsonl").read_text()
    bad_records = BadRecords(max_bad_fraction=1.0)
    num_read = sum(1 for _ in read_documents([good, path], bad_records=bad_records))
    assert (bad_records.good, bad_records.bad) == (num_read, 1)
    assert num_read - 5000 == {"a.json": 3, "a.csv": 3}.get(name, num_read - 5000) < 400
    (place,) = bad_records.unread
    assert place.startswith(f"{path}:")
    assert bad_records.note().endswith(f"; not read to the end: {place}")


def test_plain_text_among_conversations_is_one_broken_record(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "good.jsonl", *[turns(("user", "a"), ("assistant", "b"))] * 200)
    bad_records = BadRecords()
    assert len(list(read_chats([good, write(tmp_path / "a.txt", "hi")], bad_records=bad_records))) == 200
    assert bad_records.bad == 1 and not bad_records.unread and "not read" not in bad_records.note()


# --------------------------------------------------------------------------------------------------------------- errors

BROKEN = {
    "truncated": ('{"text": "a"}\n{"text": "b', "{path}:2: broken JSON at column 10: Unterminated string starting at"),
    "colon": ('{"text" "a"}', "{path}:1: broken JSON at column 9: Expecting ':' delimiter; got '\"a\"}'"),
    "list": ("\n[1, 2]", "not a record; got a number; wanted a JSON object"),
    "number": ('{"text": "a"}\n7', "{path}:2: not a record; got a number"),
    "no field": ('{"title": "a", "body": "b"}', "{path}:1: no field text; got the fields title, body; wanted text or"),
    "empty object": ("{}", "{path}:1: no field text; got no field at all"),
    "object": ('{"text": {"a": 1}}', "{path}:1: field text is not text; got an object; wanted text"),
    "boolean": ('{"text": true}', "{path}:1: field text is not text; got true or false"),
    "chat": ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "like chats"),
    "pair": ('{"chosen": 1, "rejected": 2}', "like preferences"),
    "surrogate": ('{"text": "a\\ud800"}', "{path}:1: field text has half a character; got \\ud800 without its pair at"),
    "deep": ('{"text": ' + "[" * 100_000, "{path}:1: JSON nested too deeply"),
    "two in one line": ('{"text": "a"} {"text": "b"}', "{path}:1: broken JSON at column 15: Extra data"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_lines(tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    path = write(tmp_path / "a.jsonl", content)
    assert words.replace("{path}", str(path)) in error_of(path).line()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[\n {"text": "a"},\n {"text": 1,}\n]', ":3: broken JSON at column 13: "),
        ('[{"text": "a"}\n{"text": "b"}]', ":2: broken JSON at column 1: wanted , or ]"),
        ('[{"text": "a"},\n', ":2: the JSON array is never closed"),
        ('[{"text": "a"}]\n x', ":2: broken JSON at column 2: text after the array"),
        ('[{"text": "a"}, ]', ":1: broken JSON at column 17"),
        ('[{"text": "a', ":1: broken JSON at column 11: Unterminated string"),
        ('[{"text": "a"}, "b"]', ":1: not a record; got text"),
        ("[" * 100_000, ":1: JSON nested too deeply"),
        ('[{"text": "a"}, null]', ":1: not a record; got null"),
    ],
)
def test_broken_arrays(tmp_path: Path, content: str, words: str) -> None:
    assert words in error_of(write(tmp_path / "a.json", content)).line()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id,body\n1,x\n", ":2: no field text; got the fields id, body"),
        ("id,text\n1,x\n2\n", ":3: a row of another width; got 1 fields; wanted 2"),
        ('text\na\n"never closed\nb\n', ":3: broken CSV: unexpected end of data"),
    ],
)
def test_broken_tables(tmp_path: Path, content: str, words: str) -> None:
    assert words in error_of(write(tmp_path / "a.csv", content)).line()


def test_encodings(tmp_path: Path) -> None:
    chinese = "话说天下大势，分久必合，合久必分。这是我们的国家，他来了。\n" * 20
    path = write(tmp_path / "gbk.txt", chinese.encode("gbk") + b"\xff\n")
    line = error_of(path).line()
    assert line.startswith(
        f"{path}:1: not valid UTF-8; got byte 0xbb at offset 0. It reads as GB18030: convert it with"
    )
    damaged = "他說這是我們的國家，不在這裡了。\n".encode("big5") * 9 + b"\xff\n"
    assert "BIG5" in error_of(write(tmp_path / "b.txt", damaged)).line()
    late = "好\n".encode() * 100_000 + b"caf\xe9 au lait\n"
    for name, start in [("l.txt", b""), ("l.jsonl", b""), ("l.json", b"[ ")]:
        bad = late if name == "l.txt" else b'{"text": "a"}\n' * 2 + b'{"text": "caf\xe9"}'
        path = write(tmp_path / name, start + (bad if not start else b'{"text": "a"},\n\n{"text": "caf\xe9"}'))
        number = {"l.txt": 100_001, "l.jsonl": 3, "l.json": 3}[name]
        offset = path.read_bytes().index(b"\xe9")
        assert f"{path}:{number}: not valid UTF-8; got byte 0xe9 at offset {offset}" in error_of(path).line()
        assert "It reads as" not in error_of(path).line()
    assert "binary" in error_of(write(tmp_path / "z.txt", "one\ntwo\0\n")).line()


@pytest.mark.parametrize(("name", "encoding"), [("a.jsonl", "gbk"), ("a.jsonl.gz", "gbk"), ("a.txt", "utf-16-le")])
def test_the_encoding_of_a_file_is_guessed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoding: str
) -> None:
    heads = []
    guess = files.guess_encoding

    def counted(head: bytes) -> str | None:
        heads.append(len(head))
        return guess(head)

    monkeypatch.setattr(files, "guess_encoding", counted)
    line = '{"text": "话说天下大势，这是我们的国家，他来了。"}\n' if encoding == "gbk" else "a line\n"
    raw = (line * 50).encode(encoding) + {"gbk": b"\xff\n", "utf-16-le": b"\x00\xd8\n\x00"}[encoding]  # invalid
    path = write(tmp_path / name, gzip.compress(raw) if name.endswith(".gz") else raw)
    with raises_user_error(got="100.00%") as caught:
        list(read_documents([path], bad_records=BadRecords()))
    assert len(heads) == 1
    guessed = "GB18030" if encoding == "gbk" else "UTF-16LE"
    assert f"convert it with iconv -f {guessed} -t UTF-8" in caught.value.line()
    write(path, "caf\xe9\n".encode("latin-1"))  # another file of that name
    if name == "a.jsonl":
        assert "It reads as" not in error_of(path).line()


# ---------------------------------------------------------------------------------------------------------------- chats

CALL = {"name": "add", "arguments": {"a": 1}}
TOOL = {"name": "add", "description": "adds", "parameters": {}}


def test_minimind(tmp_path: Path) -> None:
    chat = one_chat(
        tmp_path,
        {
            "conversations": [
                {"role": "system", "content": "", "tools": json.dumps([{"type": "function", "function": TOOL}])},
                {"role": "user", "content": "1+1?", "tool_calls": "", "reasoning_content": None},
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": json.dumps([CALL])},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "2."},
            ]
        },
    )
    assert chat.tools == (TOOL,)
    assert chat.messages == (
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="", reasoning_content="hm", tool_calls=(CALL,)),
        Message(role="tool", content="2"),
        Message(role="assistant", content="2."),
    )


def test_openai(tmp_path: Path) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = one_chat(
        tmp_path,
        {
            "tools": [{"type": "function", "function": TOOL}],
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "x", "content": "2"},
                {"role": "assistant", "content": "2"},
            ],
        },
    )
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[1].content == "1+\n1?"
    assert chat.messages[2].tool_calls == (CALL,)
    assert chat.tools == (TOOL,)


def test_sharegpt(tmp_path: Path) -> None:
    turns = [("human", "1+1?"), ("function_call", json.dumps(CALL)), ("observation", "2"), ("gpt", "It is 2.")]
    chat = one_chat(
        tmp_path,
        {
            "system": "Be brief.",
            "tools": json.dumps([TOOL]),
            "conversations": [{"from": role, "value": value} for role, value in turns],
        },
    )
    assert [m.role for m in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2] == Message(role="assistant", content="", tool_calls=(CALL,))
    assert chat.tools == (TOOL,)


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"instruction": "Add", "input": "1+1", "output": "2"}, [("user", "Add\n1+1"), ("assistant", "2")]),
        ({"instruction": "Hi", "input": "", "output": "Yo"}, [("user", "Hi"), ("assistant", "Yo")]),
        (
            {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]},
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
        ),
        ({"prompt": "a", "response": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"question": "a", "answer": "b", "text": "ignored"}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": "a", "completion": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"question": "a", "std_answer": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"conversation": [{"human": "a", "assistant": "b"}]}, [("user", "a"), ("assistant", "b")]),
    ],
)
def test_other_shapes(tmp_path: Path, record: dict[str, Any], wanted: list[tuple[str, str]]) -> None:
    assert roles_and_words(one_chat(tmp_path, record)) == wanted
    assert sniff(tmp_path / "one.jsonl") == "chats"


R1 = "<think>\nadd\n</think>\n\n2"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": R1}]},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": R1}]},
        {"conversation": [{"human": "1+1?", "assistant": R1}]},
        {"instruction": "1+1?", "output": R1},
        {"prompt": "1+1?", "response": f"\n{R1}"},
    ],
)
def test_a_thought_that_an_answer_begins_with_is_a_thought(tmp_path: Path, record: dict[str, Any]) -> None:
    answer = Message(role="assistant", content="2", reasoning_content="add")
    assert one_chat(tmp_path, record).messages == (Message(role="user", content="1+1?"), answer)


def test_other_words_about_thoughts_stay_words(tmp_path: Path) -> None:
    words = ["Say <think>x</think>", "<think>no end", f"  {R1.replace('<', '&')}"]
    for said in words:
        chat = one_chat(tmp_path, turns(("user", R1), ("assistant", said)))
        assert chat.messages == (Message(role="user", content=R1), Message(role="assistant", content=said))
    own = {"role": "assistant", "content": R1, "reasoning_content": "hm"}
    chat = one_chat(tmp_path, {"messages": [{"role": "system", "content": R1}, {"role": "user", "content": "?"}, own]})
    assert chat.messages[0].content == chat.messages[2].content == R1
    chat = one_chat(tmp_path, turns(("user", "?"), ("assistant", "<think>\n\n</think>\n\n2")))
    assert chat.messages[1] == Message(role="assistant", content="2")


def test_parallel_alpaca_is_two_chats(tmp_path: Path) -> None:
    record = {
        f"{side}_{name}": f"{side} {name}" for side in ("en", "zh") for name in ("instruction", "input", "output")
    }
    chats = list(read_chats([jsonl(tmp_path / "a.jsonl", record)]))
    assert [chat.messages[-1].content for chat in chats] == ["en output", "zh output"]
    assert [chat.line for chat in chats] == [1, 1]


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"role": role, "content": content} for role, content in pairs]}


BAD_CHATS: dict[str, tuple[Any, str]] = {
    "document": ({"text": "a"}, ":1: a document, not a chat; got the fields text"),
    "nothing known": ({"riddle": "a", "answer": "b"}, ":1: not a known kind of record; got the fields riddle, answer"),
    "no output": ({"instruction": "a"}, ":1: no field output; got the fields instruction"),
    "no answer": (
        {"prompt": "a", "id": 1},
        "a question without an answer; got the fields prompt, id; wanted response,",
    ),
    "role": (
        turns(("user", "a"), ("robot", "b")),
        ":1: conversations[1] has no known role; got 'robot'; wanted system,",
    ),
    "role type": ({"messages": [{"role": 3, "content": "a"}]}, "messages[0] has no known role; got 3"),
    "no role": ({"messages": [{"speaker": "a", "content": "a"}]}, "no known role; got the fields speaker, content"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0] has no content; got the fields role"),
    "content type": (turns(("user", 3)), "field conversations[0].content is not text; got a number"),
    "picture": (turns(("user", [{"type": "image_url"}])), "has a part that is not text; got image_url"),
    "no assistant": (turns(("user", "a"), ("user", "b")), ":1: no assistant turn; got user, user"),
    "no turn": ({"conversations": []}, ":1: no assistant turn; got no message at all"),
    "not a list": ({"messages": "hi"}, ":1: field messages is not a list; got text"),
    "not a message": ({"messages": ["hi"]}, ":1: messages[0] is not a message; got text"),
    "preference": ({"prompt": "a", "chosen": "b", "rejected": "c"}, ":1: preference data, not chats"),
    "label": ({**turns(("user", "a"), ("assistant", "b")), "label": False}, ":1: preference data, not chats"),
    "judged": ({"prompt": "a", "completion": "bad", "label": False}, ":1: preference data, not chats"),
    "judged Alpaca": ({"instruction": "a", "output": "bad", "label": False}, ":1: preference data, not chats"),
    "KTO tag": ({"instruction": "a", "output": "bad", "kto_tag": False}, ":1: preference data, not chats"),
    "history a number": ({"instruction": "a", "output": "b", "history": 3}, "field history is not a list; got a num"),
    "tools": ({**turns(("user", "a"), ("assistant", "b")), "tools": "[{"}, ":1: tools is not JSON"),
    "tool name": ({**turns(("user", "a"), ("assistant", "b")), "tools": [{"x": 1}]}, ":1: tools is not a function"),
    "call": ({"messages": [{"role": "assistant", "content": "", "tool_calls": "run()"}]}, "the tool call is not JSON"),
    "arguments": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]}]},
        "messages[0]: arguments; got a list; wanted an object",
    ),
    "history": ({"instruction": "a", "output": "b", "history": ["a"]}, "field history is not pairs; got text"),
    "surrogate": ({"prompt": "a", "response": "\ud83d"}, "field response has half a character"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chats(tmp_path: Path, name: str) -> None:
    record, words = BAD_CHATS[name]
    path = write(tmp_path / "a.jsonl", json.dumps(record))
    line = error_of(path, read_chats).line()
    assert line.startswith(f"{path}:1: ")
    assert words in line


def test_empty_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    good = turns(("user", "a"), ("assistant", "b"))
    path = jsonl(
        tmp_path / "a.jsonl", good, turns(("user", "a"), ("assistant", " ")), {"prompt": "a", "response": None}
    )
    bad_records = BadRecords()
    assert len(list(read_chats([path], bad_records=bad_records))) == 1
    assert bad_records.reasons == {"an answer is empty": 2} and bad_records.left_out == 2
    half = {"en_instruction": "a", "en_output": "b", "zh_instruction": "c", "zh_output": ""}
    bad_records = BadRecords()
    assert len(list(read_chats([jsonl(tmp_path / "b.jsonl", half)], bad_records=bad_records))) == 1
    assert bad_records.reasons.total() == bad_records.records == bad_records.good == 1
    assert "documents, not chats" in error_of(write(tmp_path / "a.txt", "hi"), read_chats).line()


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "a"}, "documents"),
        ({"content": "a", "id": 3}, "documents"),
        ({"prompt": "write", "text": "a story"}, "documents"),
        (turns(("user", "a"), ("assistant", "b")), "chats"),
        (turns(("user", "a"), ("assistant", "")), "prompts"),
        (turns(("user", "a")), "prompts"),
        ({**turns(("user", "a"), ("assistant", "b")), "gt": ["2"]}, "prompts"),
        ({"prompt": "a"}, "prompts"),
        ({"chosen": [], "rejected": []}, "preferences"),
        ({**turns(("user", "a"), ("assistant", "b")), "label": True}, "preferences"),
        ({"prompt": "a", "completion": "b", "label": True}, "preferences"),
        ({"instruction": "a", "input": "", "output": "b", "kto_tag": False}, "preferences"),
        ({"text": "a", "label": True}, "documents"),
        ({"text": "a", "answer": "b", "label": True}, "documents"),
        ({"question": "a", "answer": "b", "label": 1}, "chats"),
        (turns(("user", "a"), ("assistant", "无")), "prompts"),  # MiniMind's, in the place of an answer
        (turns(("user", "a"), ("assistant", "空")), "prompts"),
        (turns(("user", "a"), ("assistant", "空的")), "chats"),
        ({"question": "a", "answer": "b"}, "chats"),
    ],
)
def test_sniff(tmp_path: Path, record: dict[str, Any], kind: str) -> None:
    assert sniff(jsonl(tmp_path / "a.jsonl", record, {"x": 1})) == kind
    assert sniff(tmp_path) == kind


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (turns(("user", "a"), ("assistant", "")), [("user", "a")]),
        (turns(("user", "a"), ("assistant", "无")), [("user", "a")]),  # MiniMind's, in the place of an answer
        ({"prompt": "a"}, [("user", "a")]),
        ({"prompt": "a", "system": "s"}, [("system", "s"), ("user", "a")]),
        ({"prompt": [{"role": "user", "content": "a"}], "system": "s"}, [("system", "s"), ("user", "a")]),
        ({"question": "a", "answer": "b"}, [("user", "a")]),
        ({"instruction": "a", "input": "b", "output": "c"}, [("user", "a\nb")]),
    ],
)
def test_prompts(tmp_path: Path, record: dict[str, Any], wanted: list[tuple[str, str]]) -> None:
    (chat,) = read_prompts([jsonl(tmp_path / "a.jsonl", record)])
    assert roles_and_words(chat) == wanted
    assert chat.fields == record


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "a"}, "no conversation; got the fields text; wanted conversations, messages, conversation, prompt"),
        ({"prompt": " "}, "the last turn asks nothing; got no message at all"),
        (turns(("assistant", "b"), ("assistant", "c")), "the last turn asks nothing; got no message at all"),
        ({"prompt": 3}, "field prompt is not text; got a number"),
    ],
)
def test_bad_prompts(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    assert f":1: {words}" in error_of(jsonl(tmp_path / "a.jsonl", record), read_prompts).line()


def test_one_real_answer_makes_placeholders_answers(tmp_path: Path) -> None:
    records = [turns(("user", "a"), ("assistant", answer)) for answer in ("空", "b")]
    assert sniff(jsonl(tmp_path / "a.jsonl", *records)) == "chats"


def test_sniff_of_text_and_of_nothing(tmp_path: Path) -> None:
    assert sniff(write(tmp_path / "a.txt", "hi")) == "documents"
    with raises_user_error(where="b.jsonl:1", got="the fields riddle"):
        sniff(jsonl(tmp_path / "b.jsonl", {"riddle": "a"}))
    with pytest.raises(UserError, match="the file is empty"):
        sniff(write(tmp_path / "c.jsonl", ""))


# ----------------------------------------------------------------------------------------------------------- real files


def real(folder: str, pattern: str = "*") -> list[Path]:
    return sorted(path for path in (DATA / folder).glob(pattern) if path.is_file())


@needs_data
def test_every_chat_file_reads() -> None:
    counts = {}
    for path in real("sft"):
        counted = NoBadRecords()
        num_chats = sum(1 for _ in read_chats([path], bad_records=counted))
        counts[path.name] = (num_chats, counted.reasons.total())
        assert sniff(path) == "chats"
    assert counts["alpaca_bilingual_8k.jsonl"] == (15_984, 16)
    assert counts["belle_eval_set.jsonl"] == (631, 369)
    assert counts["glaive_toolcall_zh_demo.json"] == (300, 0)
    assert sum(kept for kept, _ in counts.values()) == 34_636


@needs_data
def test_tool_calls_of_a_real_file() -> None:
    chats = list(read_chats([DATA / "sft/glaive_toolcall_en_demo.json"]))
    calls = [call for chat in chats for message in chat.messages for call in message.tool_calls]
    assert calls[0]["name"] == "search_recipes"
    assert all(set(call) == {"name", "arguments"} and isinstance(call["arguments"], dict) for call in calls)
    assert sum(bool(chat.tools) for chat in chats) > 150


@needs_data
@pytest.mark.parametrize(
    ("name", "num_documents"),
    [
        ("pretrain_en/tinystories_a.txt", 1728),
        ("pretrain_en/bronte.txt", 1649),
        ("pretrain_en/childrens_books.jsonl", 406),
        ("pretrain_en/c4_demo.jsonl", 300),
        ("pretrain_en/names.txt", 76),
        ("pretrain_zh/三国演义.txt", 260),
        ("pretrain_zh/songci.jsonl", 21_050),
        ("bilingual/cmn_eng_tatoeba.txt", 300),
    ],
)
def test_real_documents(name: str, num_documents: int) -> None:
    path = DATA / name
    found = list(read_documents([path]))
    assert len(found) == num_documents
    if path.suffix == ".txt":
        seen = "".join("".join(document.text.split()) for document in found)
        raw = path.read_text(encoding="utf-8-sig").replace("<|endoftext|>", "")
        assert seen == "".join(raw.split())  # not one visible character is lost


@needs_data
def test_a_novel_has_no_indents_left() -> None:
    for document in read_documents([DATA / "pretrain_zh/三国演义.txt"]):
        assert "\r" not in document.text and not any(
            line.startswith((" ", "\t", "\u3000")) for line in document.text.split("\n")
        )


def nasty() -> Iterator[Path]:
    yield from real("dirty/json_test_suite")
    yield from real("dirty/schema")
    yield from real("dirty/encodings/GB2312") + real("dirty/encodings/UTF-16")


@needs_data
def test_nasty_json_ends_in_one_clear_line(tmp_path: Path) -> None:
    accepted = []
    for path in nasty():
        for suffix in (".json", ".jsonl", ".txt"):
            copy = write(tmp_path / f"case{suffix}", path.read_bytes())
            for read in (read_documents, read_chats):
                try:
                    list(read([copy]))
                    accepted.append((path.name, suffix))
                except UserError as error:
                    assert "\n" not in str(error) and str(error).startswith(str(copy)) and len(str(error)) < 500
    assert not [name for name, suffix in accepted if name.startswith("n_") and suffix != ".txt"]


@needs_data
def test_preference_files_are_known(tmp_path: Path) -> None:
    for path in [*real("pref"), DATA / "dirty/schema/kto_en_demo_wrong_stage.json"]:
        assert sniff(path) == "preferences"
        assert "preference data" in error_of(path, read_chats).line()


@needs_data
@pytest.mark.parametrize(
    ("name", "num_read"),
    [("dpo_en_demo_200", 200), ("dpo_zh_demo_200", 200), ("kto_en_demo", 300), ("firefly_dummy_dpo", 16)],
)
def test_every_preference_file_reads(name: str, num_read: int) -> None:
    (path,) = real("pref", f"{name}.*")
    bad_records = BadRecords(max_bad_fraction=0)
    assert len(list(read_preferences([path], bad_records=bad_records))) == num_read
    assert bad_records.bad == 0


@needs_data
def test_a_real_tsv_without_quoting_keeps_every_row() -> None:
    path = DATA / "pretrain_zh/csl_ts_dev.tsv"
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    assert [list(record.values()) for _, record in rows_of(path) if isinstance(record, dict)] == rows


@needs_data
def test_every_problem_of_gsm8k_is_a_prompt() -> None:
    found = list(read_prompts([DATA / "math/gsm8k_test.jsonl"]))
    assert len(found) == 1319
    assert all([m.role for m in chat.messages] == ["user"] and "####" in chat.fields["answer"] for chat in found)


@pytest.mark.parametrize("name", ["images", "image", "videos", "audio", "audios"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_conversation_with_pictures_or_sound_is_set_aside(tmp_path: Path, name: str, inside: bool) -> None:
    plain = {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a kite"}]}
    turns: list[dict[str, Any]] = plain["messages"]
    bad = {"messages": [turns[0] | {name: ["a.png"]}, turns[1]]} if inside else plain | {name: ["a.png"]}
    none = plain | {name: []}  # a column of a table, empty in this row
    path = jsonl(tmp_path / "a.jsonl", plain, bad, none, plain)
    bad_records = BadRecords(0.9, tmp_path / "bad.jsonl")
    assert [chat.line for chat in read_chats([path], bad_records=bad_records)] == [1, 3, 4]
    assert bad_records.bad == 1
    assert f"field {name} is not text" in (tmp_path / "bad.jsonl").read_text()


# --------------------------------------------------------------------------------------- folders, names and indents


def test_code_in_text_files_keeps_its_indents(tmp_path: Path) -> None:
    code = 'class A:\n    """\n    计算总和\n    """\n\tdef f(self):\n        变量 = 1\n        return "中文"'
    assert texts(write(tmp_path / "a.txt", code)) == [code]
    novel = "    话说天下大势\n    分久必合\n\u3000\u3000合久必分\n    Mary said\n"
    assert texts(write(tmp_path / "b.txt", novel)) == ["话说天下大势\n分久必合\n合久必分\n    Mary said"]
    prose = "    话说天下大势\n    分久必合\n    Mary said\n"
    assert texts(write(tmp_path / "c.txt", prose)) == ["话说天下大势\n分久必合\n    Mary said"]


@pytest.mark.parametrize("text", [
    "x = {\n    # 名字\n    “甲”: 1,\n    'b': 2,\n}",
    "He read:\n    “‘And ne’er but once, my son,’ he said,\n      ‘Was yon dark cavern trod;\nand wept.",
    "一、总则\n    （一）目的\n        1. 内容",  # half of the indented lines are Chinese
    "ファイル\n    これは、アプリケーションの\n    情報です。\n    プロジェクト",
    "if a:\n\treturn “中”\n\tpass",
])  # fmt: skip
def test_indents_of_code_verse_and_lists_stay(tmp_path: Path, text: str) -> None:
    assert texts(write(tmp_path / "a.txt", text)) == [text]


@pytest.mark.parametrize("indent", ["\u3000\u3000", "    ", "\t", " \u3000 ", "  "])
def test_indents_of_chinese_paragraphs_are_dropped(tmp_path: Path, indent: str) -> None:
    lines = ["第一章", "“你好，”他说。", "……", "——走吧！", "他走了。"]
    written = lines[:1] + [indent + line for line in lines[1:]]
    assert texts(write(tmp_path / "a.txt", "\n".join(written))) == ["\n".join(lines)]


def test_names_with_wildcards(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    paths = [jsonl(tmp_path / "parts" / f"{name}.jsonl", {"text": name}) for name in "ba"]
    assert list_files([tmp_path / "parts" / "*.jsonl"]) == paths[::-1]
    literal = jsonl(tmp_path / "parts" / "[1].jsonl", {"text": "c"})
    assert list_files([literal]) == [literal]
    with raises_user_error(where="*.txt"):
        list_files([tmp_path / "parts" / "*.txt"])


def test_test_splits_beside_a_train_split_are_left_out(tmp_path: Path) -> None:
    names = ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "validation.jsonl", "latest.jsonl"]
    (tmp_path / "data").mkdir()
    paths = [jsonl(tmp_path / name, {"text": name}) for name in names]
    with pytest.warns(UserWarning, match=r"test-00000-of-00001\.jsonl, validation\.jsonl$"):
        assert list_files([tmp_path]) == [paths[0], paths[3]]
    assert list_files([paths[1]]) == [paths[1]]
    paths[0].unlink()
    assert len(list_files([tmp_path])) == 3


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"text {number}", "other": number} for number in range(700)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "splits")
    assert sorted(texts(tmp_path / "one")) == sorted(row["text"] for row in rows)
    with pytest.warns(UserWarning, match="test/"):
        assert texts(tmp_path / "splits") == [row["text"] for row in rows]
    arrow = next((tmp_path / "one").glob("*.arrow"))
    assert [record for _, record in rows_of(arrow)] == rows[:350]
    arrow.write_bytes(arrow.read_bytes()[:-100])
    assert "broken arrow file" in error_of(arrow).what


@pytest.mark.parametrize("alphabet", ["ACGT", "你好吗", "aé你🎈"])
def test_a_long_line_of_text_becomes_documents_and_nothing_is_lost(tmp_path: Path, alphabet: str) -> None:
    rng = random.Random(2)
    line = "".join(rng.choices(alphabet, k=300_000))
    path = write(tmp_path / "a.txt", f"{line}\n")
    found = list(read_documents([path]))
    assert "".join(document.text for document in found) == line
    assert all(len(document.text.encode()) >= 2**16 - 4 for document in found[:-1])
    assert max(len(document.text.encode()) for document in found) <= 2**16
    assert {document.line for document in found} == {1}
    assert texts(write(tmp_path / "a.jsonl", json.dumps({"text": line}))) == [line], "a record is not cut"


@pytest.mark.parametrize("sentence", ["The cat sat on the mat. ", "猫坐在垫子上。", "word "])
def test_a_long_line_is_cut_after_a_sentence_or_a_word(tmp_path: Path, sentence: str) -> None:
    found = texts(write(tmp_path / "a.txt", sentence * 20_000))
    assert len(found) > 1 and all(text.startswith(sentence[:3]) for text in found)
    assert "".join(text + sentence[len(sentence.rstrip()) :] for text in found) == sentence * 20_000


def test_one_line_of_more_than_64_mib_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"ACGTTGCA" * (9 << 20))
    assert sum(len(document.text) for document in read_documents([path])) == 72 << 20


def test_long_lines_are_not_cut_inside_a_separator_or_a_paragraph(tmp_path: Path) -> None:
    for shift in range(-15, 2):
        path = write(tmp_path / "a.txt", "A" * (2**16 + shift) + "<|endoftext|>" + "B" * 99)
        assert "".join(texts(path)) == "A" * (2**16 + shift) + "B" * 99
        assert not any("AB" in text for text in texts(path))
    paragraphs = [f"{number} " + "some words " * (number % 90) + "end" for number in range(999)]
    found = texts(write(tmp_path / "b.txt", "\r".join(paragraphs)))
    assert "\n".join(found).split("\n") == paragraphs
    assert texts(write(tmp_path / "c.txt", b"\xef\xbb\xbf" + b"A" * 99_999)) == [
        "A" * (2**16 - 3),
        "A" * (99_999 - 2**16 + 3),
    ]


def test_a_broken_character_costs_only_its_document_of_a_long_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"A" * 200_000 + b"\xff" + b"C" * 200_000)
    bad = BadRecords(max_bad_fraction=1.0)
    assert (
        400_000 - 2 * 2**16 <= sum(len(document.text) for document in read_documents([path], bad_records=bad)) < 400_000
    )
    assert bad.bad == 1
