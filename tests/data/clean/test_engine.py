"""`penjing data clean`: counts, trace, resumption after a kill, and output that depends on nothing but the input."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import penjing
from penjing.base.errors import UserError
from penjing.data.clean import clean_piece, engine
from penjing.data.clean.engine import clean
from penjing.data.clean.language import script_of
from penjing.data.clean.pieces import make_pieces
from penjing.data.clean.pipeline import Pipeline
from penjing.data.clean.text_scan import scan
from penjing.data.corpus import Corpus, DataSettings
from penjing.data.formats import READERS, Chat, Document, Message, PreferenceRecord
from penjing.data.formats.write import record_row
from penjing.workflows.clean_corpus import clean_corpus

RULES = ("unicode", "exact_duplicates", "near_duplicates")
WORDS = [f"{first}{last}" for first in "bcdfgklmnprst" for last in ("an", "ell", "irt", "ond", "uck", "ail", "ow")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "make_pieces", lambda files, folder: make_pieces(files, folder, 20_000))


def write_corpus(path: Path, num: int = 400, seed: int = 1) -> list[Any]:
    """Lines with copies, near copies, characters to remove, empty texts and broken lines. Returns the lines' kinds."""
    rng, texts, lines, kinds = random.Random(seed), list[str](), list[str](), list[str]()
    for _ in range(num):
        kind = rng.choice(["new", "new", "new", "copy", "near", "dirty", "empty", "broken"]) if texts else "new"
        text = " ".join(rng.choices(WORDS, k=rng.randint(20, 120)))
        if kind in ("copy", "near"):
            text = rng.choice(texts)
            if kind == "near":
                words = text.split()
                text = (
                    " ".join([*words, "more"])
                    if len(words) > 40
                    else f"{text} 。" * 0 + " ".join(rng.choices(WORDS, k=50))
                )
        elif kind == "dirty":
            text = text.replace(" ", " \u200b", 2)
        elif kind == "empty":
            text = rng.choice(["", "  \n"])
        if kind in ("new", "dirty"):
            texts.append(text)
        kinds.append(kind)
        lines.append(
            rng.choice(['{"text": "cut', '"a text"', "{}"]) if kind == "broken" else json.dumps({"text": text})
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return kinds


def packed(path: Path, suffix: str, size: int | None = None) -> Path:
    """The file compressed, of which only so many bytes are left."""
    data = path.read_bytes()
    content = gzip.compress(data, mtime=0) if suffix == ".gz" else zstandard.ZstdCompressor().compress(data)
    path.unlink()
    path = path.with_name(path.name + suffix)
    path.write_bytes(content[:size])
    return path


def run(files: list[Path], out: Path, *rules: str, **settings: Any) -> dict[str, Any]:
    settings = {"kind": "documents", "workers": 1, **settings}
    return clean(files, out, pipeline=Pipeline.load(rules or RULES), **settings)


def trace(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "_cleaning" / "trace.jsonl").read_text().splitlines()]


def output(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.jsonl"))}


def test_counts_trace_and_the_same_records_as_a_run_reads(tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl", tmp_path / "three.jsonl.gz"]
    kinds = [kind for seed, file in enumerate(files[:2]) for kind in write_corpus(file, seed=seed)]
    files[2].write_bytes(gzip.compress(files[0].read_bytes()))  # all copies
    kinds += kinds[:400]
    counts = run(files, tmp_path / "out")
    assert counts["records"] == 1200 == counts["kept"] + counts["dropped"] + counts["broken"]
    assert counts["broken"] == Counter(kinds)["broken"]
    assert sum(number for *_, number in counts["rules"]) == counts["dropped"] + counts["broken"] + counts["changed"]

    settings = DataSettings(train=tuple(map(str, files)), clean=RULES, max_bad_fraction=1)
    expected = [record.text for record in Corpus(settings).records()]
    cleaned = Corpus(DataSettings(train=(str(tmp_path / "out"),)))
    assert [record.text for record in cleaned.records()] == expected
    assert len(expected) == counts["kept"] < 600

    entries = trace(tmp_path / "out")
    actions = Counter(entry["action"] for entry in entries)
    assert {name: actions[name] for name in ("dropped", "broken", "changed")} == {
        name: counts[name] for name in ("dropped", "broken", "changed")
    }
    gone = {(entry["file"], entry["line"]) for entry in entries if entry["action"] != "changed"}
    assert len(gone) == counts["dropped"] + counts["broken"], "each record once"
    assert all((str(files[0]), line) in gone for line, kind in enumerate(kinds[:400], 1) if kind in ("empty", "broken"))
    assert {(str(files[0]), n + 1) in gone for n in range(400) if kinds[n] == "copy"} == {True}
    assert all(entry["rule"] in (*RULES, "reader") or entry["action"] == "broken" for entry in entries)
    near = next(entry for entry in entries if entry["rule"] == "near_duplicates")
    assert near["sample"]
    assert Path(near["detail"].rpartition(":")[0]) in files


def test_output_does_not_depend_on_processes_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files):
        write_corpus(file, seed=number)
    counts = [run(files, tmp_path / "one", workers=1), run(files, tmp_path / "three", workers=3)]
    monkeypatch.setattr("penjing.data.clean.compare_pieces._BYTES_PER_KEY", 1 << 22)  # sorted in many parts
    counts.append(run(files, tmp_path / "parts", workers=1))
    assert output(tmp_path / "one") == output(tmp_path / "three") == output(tmp_path / "parts")
    assert counts[0] == counts[1] == counts[2]
    assert len(counts[0]["shards"]) > 3


def test_pieces_are_whole_lines_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": "x" * (number * 37 % 900)}) for number in range(300)]
    lines[100:103] = ["", "[1]", "  "]
    path.write_text("\n".join(lines))
    pieces = list(make_pieces([(path, 0)], tmp_path, 4000))
    parts = [part.lines for piece in pieces for part in piece.parts]
    assert len(parts) > 20
    data = path.read_bytes()
    assert b"".join(data[part.start : part.end] for part in parts if part) == data
    for part in parts:
        assert part and part.first_line == data[: part.start].count(b"\n") + 1
        assert data[part.start : part.start + 1] == b"{"


def test_a_compressed_file_is_cut_as_its_content_is(tmp_path: Path) -> None:
    plain, twin = tmp_path / "a.jsonl", tmp_path / "twin" / "a.jsonl"
    twin.parent.mkdir()
    write_corpus(plain, 700), write_corpus(twin, 700)
    twin = packed(twin, ".gz")
    counts = [run([plain], tmp_path / "plain"), run([twin], tmp_path / "one", workers=1)]
    counts.append(run([twin], tmp_path / "two", workers=2))
    assert len(counts[0]["shards"]) > 5 and output(tmp_path / "one") == output(tmp_path / "two")
    records = {out: [*(tmp_path / out).glob("*.jsonl")] for out in ("plain", "one")}
    texts = [b"".join(path.read_bytes() for path in sorted(paths)) for paths in records.values()]
    assert texts[0] == texts[1] and counts[0]["rules"] == counts[1]["rules"]
    assert [(e["line"], e["action"]) for e in trace(tmp_path / "plain")] == [
        (e["line"], e["action"]) for e in trace(tmp_path / "one")
    ]
    assert [path.name for path in (tmp_path / "one" / "_cleaning").glob("w*")] == []


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_cleaned_up_to_there(tmp_path: Path, suffix: str) -> None:
    plain, file = tmp_path / "plain.jsonl", tmp_path / "a.jsonl"
    write_corpus(plain, 900), write_corpus(file, 900)
    file = packed(file, suffix, size=-3000)
    for workers in (1, 2):
        counts = run([file], tmp_path / str(workers), "unicode", workers=workers)
        assert counts["records"] == counts["kept"] + counts["dropped"] + counts["broken"] > 300
        last = trace(tmp_path / str(workers))[-1]
        assert last["action"] == "broken" and suffix[1:] in last["detail"] and 300 < last["line"] < 900
    assert output(tmp_path / "1") == output(tmp_path / "2")
    whole = [json.loads(line)["text"] for line in plain.read_text().splitlines() if line.startswith('{"text')
             and line.endswith("}")]  # fmt: skip
    kept = [json.loads(line)["text"] for path in sorted((tmp_path / "1").glob("*.jsonl")) for line in open(path)]
    assert kept == [text.replace("\u200b", "") for text in whole if text.strip()][: len(kept)]


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_corpus(file)
    first = run([file], out)
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")}
    again = run([file], out)
    assert (first.pop("is_new"), again.pop("is_new")) == (True, False)
    assert first == again
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.jsonl")} == times

    assert run([file], out, "unicode")["is_new"], "other rules"
    with open(file, "a") as stream:
        stream.write('{"text": "one more"}\n')
    assert run([file], out, "unicode")["is_new"], "another file"
    next(out.glob("*.jsonl")).unlink()
    assert run([file], out, "unicode")["is_new"], "a shard is gone"


def test_old_shards_go(tmp_path: Path) -> None:
    large, small, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out"
    write_corpus(large, 800)
    small.write_text('{"text": "one"}\n')
    assert len(run([large], out)["shards"]) > 1
    run([small], out)
    assert [path.name for path in out.glob("*.jsonl")] == ["documents-00000.jsonl"]
    assert json.loads((out / "documents-00000.jsonl").read_text()) == {"text": "one"}


KILLED = """
import sys
from pathlib import Path
from penjing.data.clean import engine
from penjing.data.clean.pieces import make_pieces
from penjing.data.clean.pipeline import Pipeline
engine.make_pieces = lambda files, folder: make_pieces(files, folder, 20_000)
if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[2:]]
    engine.clean(files, Path(sys.argv[1]), kind="documents", pipeline=Pipeline.load(%r), workers=2)
"""


def test_a_killed_run_continues(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for number, file in enumerate(files):
        write_corpus(file, 600, seed=number)
    files[0] = packed(files[0], ".gz")
    out, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED % (RULES,))
    environment = {**os.environ, "PYTHONPATH": str(Path(penjing.__file__).parents[1])}
    work = out / "_cleaning" / "work"
    finished = set[str]()
    for _ in range(2):
        process = subprocess.Popen([sys.executable, str(script), str(out), *map(str, files)], env=environment)
        deadline = time.monotonic() + 60
        before = len(finished)
        while len(finished) <= before and process.poll() is None and time.monotonic() < deadline:
            finished = {path.name for path in work.glob("[0-9]*[0-9]")}
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(0.5)  # the processes that it started end by themselves
    finished = {path.name for path in work.glob("[0-9]*[0-9]")}
    assert finished, "no piece was done"
    cleaned = list[str]()
    original = engine.clean_piece

    def spy(rules: Any, piece: Any, kind: Any, folder: Path, columns: Any) -> None:
        cleaned.append(folder.name)
        original(rules, piece, kind, folder, columns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "clean_piece", spy)
        run(files, out, workers=1)
    assert cleaned
    assert not finished & set(cleaned), "done again"
    run(files, tmp_path / "whole", workers=1)
    assert output(out) == output(tmp_path / "whole")
    assert not work.exists()


def test_folders_that_are_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    file.write_text('{"text": "one"}\n')
    with pytest.raises(UserError, match="input lies in"):
        run([file], tmp_path)
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="other files"):
        run([file], out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_parts_of_a_record_are_counted_each(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"text": "one two<|endoftext|>three<|endoftext|>one two"}, {"text": "\u200b"}, {"text": "three"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = run([file], tmp_path / "out", "unicode", "exact_duplicates")
    assert (counts["records"], counts["kept"], counts["dropped"], counts["broken"]) == (5, 2, 3, 0)


# --- what is written is read back ------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda text: text.strip()
)
calls = st.builds(lambda name, value: {"name": name, "arguments": {"x": value}}, st.sampled_from("ab"), st.integers())


@st.composite
def conversations(draw: st.DrawFn, ends_with: str = "assistant") -> tuple[Message, ...]:
    messages = [Message(role="system", content=draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        thought = draw(st.just("") | texts.map(lambda text: text.strip()))
        answer = Message(role="assistant", content=f"A{draw(texts)}", reasoning_content=thought)
        messages += [Message(role="user", content=draw(texts)), answer]
        if draw(st.booleans()):
            call = Message(role="assistant", content="", tool_calls=(draw(calls),))
            messages[-1:] = [call, Message(role="tool", content=draw(texts)), answer]
    return tuple(messages if ends_with == "assistant" else messages[:-1])


def read_back(record: Any, kind: Any, folder: Path) -> Any:
    path = folder / "a.jsonl"
    path.write_text(json.dumps(record_row(record), ensure_ascii=False) + "\n", encoding="utf-8")
    return list(READERS[kind]([path]))


@given(conversations(), st.booleans())
def test_chats_are_read_back(tmp_path_factory: pytest.TempPathFactory, messages: Any, with_tools: bool) -> None:
    folder = tmp_path_factory.mktemp("chats")
    tools = ({"name": "a", "parameters": {}},) if with_tools else ()
    chat = Chat(messages=messages, tools=tools, source=str(folder / "a.jsonl"), line=1)
    assert read_back(chat, "chats", folder) == [chat]


@given(conversations(), texts, st.sampled_from([0.0, 1.5]))
def test_preferences_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, messages: Any, other: str, margin: float
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    place = {"tools": (), "source": str(folder / "a.jsonl"), "line": 1}
    worse = (*messages[:-1], Message(role="assistant", content=f"B{other}"))
    chats = tuple(Chat(messages=each, **place) for each in (messages, worse))
    pair = PreferenceRecord(chats=chats, is_chosen=(True, False), margin=margin)
    single = PreferenceRecord(chats=chats[:1], is_chosen=(False,))
    assert read_back(pair, "preferences", folder) == [pair]
    assert read_back(single, "preferences", folder) == [single]


@given(conversations(ends_with="user"))
def test_prompts_keep_their_reference_answers(tmp_path_factory: pytest.TempPathFactory, messages: Any) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    fields = {"prompt": "old", "gt": "4", "cases": [1, 2], "id": 7}
    prompt = Chat(messages=messages, tools=(), source=str(folder / "a.jsonl"), line=1, fields=fields)
    (found,) = read_back(prompt, "prompts", folder)
    assert found == prompt
    assert {name: found.fields[name] for name in ("gt", "cases", "id")} == {"gt": "4", "cases": [1, 2], "id": 7}


def test_documents_are_read_back(tmp_path: Path) -> None:
    document = Document(text=" a\n\nb ", source=str(tmp_path / "a.jsonl"), line=1)
    assert read_back(document, "documents", tmp_path) == [document]


def test_a_trace_has_bounded_samples(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"same {n % 2}"}) for n in range(300)] + [f'{{{" " * n}"a" 1}}' for n in range(300)]
    file.write_text("\n".join(lines))
    counts = run([file], tmp_path / "out", "exact_duplicates")
    assert (counts["broken"], counts["dropped"], counts["kept"]) == (300, 298, 2)
    assert len(counts["rules"]) == 2, "kinds of errors, not columns"
    assert len(counts["examples"]) <= 10
    entries = trace(tmp_path / "out")
    assert [entry["line"] for entry in entries if entry["action"] == "dropped"] == list(range(3, 301))
    assert sum("sample" in entry for entry in entries) < 30


def test_the_command_to_train_on_it_can_be_copied(tmp_path, capsys):
    source, out = tmp_path / "my texts.jsonl", tmp_path / "all clean"
    source.write_text(json.dumps({"text": "The mill stands by the river, and nobody works there."}) + "\n")
    clean_corpus([source], out, Console(width=500), pipeline=["unicode"])
    assert f"data.train={shlex.quote(str(out))}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "中国的 abc，" * 9,
        "カナと漢字の文" * 9,
        "plain “text” with marks",
        "слова и words",
        "한국어 문장",
        "a 中 b 国 c",
        "十" * 999,
    ],
)
def test_the_language_of_a_record_is_that_of_its_scan(text):
    language = clean_piece.LANGUAGES[clean_piece.measures(text)[0]]
    wanted = {"Latin": clean_piece.LANGUAGES[0], "Chinese": "Chinese"}.get(script_of(scan(text)), "other")
    assert language == wanted
