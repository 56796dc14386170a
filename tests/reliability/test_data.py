"""Broken data of every kind, to every reader: no crash, no hang, bounded memory, and every record accounted for."""

import gzip
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nasty_files import NASTY_FILES, expected, written
from reliability_harness import by_chance
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data import formats as records
from penjing.data.formats import BadRecords, files

READERS = {
    "documents": records.read_documents,
    "chats": records.read_chats,
    "prompts": records.read_prompts,
    "preferences": records.read_preferences,
}
GOOD = {
    "documents": {"text": "A good text."},
    "chats": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "prompts": {"messages": [{"role": "user", "content": "a"}]},
    "preferences": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


def turns(*roles):
    return {"messages": [{"role": role, "content": f"said {index}"} for index, role in enumerate(roles)]}


def line(value):
    return json.dumps(value).encode()


def nasty(kind):
    """name -> one line that is no good record of this kind, though others around it are."""
    good = GOOD[kind]
    field = next(iter(good))
    both = {
        "broken JSON": b'{"text": "a"',
        "no JSON at all": b"hello there",
        "single quotes": b"{'text': 'a'}",
        "trailing comma": b'{"text": "a",}',
        "two values": line(good) + b" " + line(good),
        "a list": b"[1, 2]",
        "a number": b"7",
        "null": b"null",
        "text": b'"text"',
        "true": b"true",
        "empty object": b"{}",
        "other fields": b'{"title": "a", "body": "b"}',
        "null content": line({field: None}),
        "number content": line({field: 3}),
        "object content": line({field: {"a": 1}}),
        "bool content": line({field: True}),
        "invalid UTF-8": b'{"' + field.encode() + b'": "caf\xe9"}',
        "cut character": line(good)[:-2] + b"\xe4\xbd",
        "overlong UTF-8": b'{"' + field.encode() + b'": "\xc0\xaf"}',
        "half a surrogate, raw": b'{"' + field.encode() + b'": "\xed\xa0\x80"}',
        "Latin-1 quotes": b'{"' + field.encode() + b'": "\x93a\x94"}',
        "UTF-16 line": line(good).decode().encode("utf-16"),
        "GBK line": '{"text": "话说天下大势"}'.encode("gbk"),
        "zeros": b"\0" * 40,
        "raw control characters": b'{"' + field.encode() + b'": "a\x01\x02"}',
        "lone surrogate": b'{"text": "a\\ud800", "messages": [{"role": "user", "content": "\\udfff"}], "chosen": "\\ud8'
        b'00", "rejected": "b", "prompt": "a"}',
        "deep nesting": b'{"x": ' + b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000,
        "huge integer": b'{"text": ' + b"9" * 6000 + b"}",
        "NaN as text": b'{"text": NaN, "messages": NaN, "chosen": NaN, "rejected": NaN}',
        "infinity": b'{"text": -Infinity}',
        "huge float": b'{"text": 1e99999}',
        "a BOM inside": b"\xef\xbb\xbf\xef\xbb\xbf" + line(good),
        "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
        "an LFS pointer": b"version https://git-lfs.github.com/spec/v1",
    }
    thought = {"role": "assistant", "content": "a", "thinking": "b"}
    exchange = turns("user", "assistant")["messages"]
    chats = {
        "messages not a list": {"messages": "hi"},
        "message not an object": {"messages": ["hi"]},
        "no turns": {"messages": []},
        "unknown role": turns("user", "robot"),
        "role a number": {"messages": [{"role": 3, "content": "a"}]},
        "no role": {"messages": [{"content": "a"}]},
        "no content": {"messages": [{"role": "user"}]},
        "content a number": {"messages": [{"role": "user", "content": 3}]},
        "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "system in the middle": turns("user", "system", "assistant"),
        "system at the end": turns("system", "user", "assistant", "system"),
        "only system": turns("system"),
        "tool before a call": turns("tool", "assistant"),
        "tool after a question": turns("user", "tool", "assistant"),
        "thought after an answer": {"messages": [*exchange, thought, *exchange]},
        "tool after system": turns("system", "tool", "user", "assistant"),
        "tools not JSON": {**turns("user", "assistant"), "tools": "[{"},
        "tool without a name": {**turns("user", "assistant"), "tools": [{"x": 1}]},
        "call not JSON": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": "f("}]},
    }
    if kind == "documents":
        return both
    both |= {name: line(value) for name, value in chats.items()}
    if kind == "preferences":
        both |= {
            "chosen a number": line({"prompt": "a", "chosen": 1, "rejected": "b"}),
            "no rejected": line({"prompt": "a", "chosen": "b"}),
            "no prompt": line({"chosen": "a", "rejected": "b"}),
            "margin a text": line({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}),
            "margin NaN": b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}',
            "margin huge": b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1' + b"0" * 400 + b"}",
            "label a text": line({"prompt": "a", "completion": "b", "label": "yes"}),
            "label without answer": line({"prompt": "a", "label": True}),
            "ends with a question": line({"prompt": "a", "chosen": turns("user", "assistant", "user")["messages"],
                                          "rejected": "b"}),
        }  # fmt: skip
    return both


def read(kind, paths, **limits):
    """(records, bad_records)."""
    bad_records = BadRecords(max_bad_fraction=1.0, **limits)
    found = list(READERS[kind](paths, bad_records=bad_records))
    return found, bad_records


@pytest.mark.parametrize("kind", READERS)
def test_nasty_lines_are_set_aside_one_by_one(tmp_path, kind, count):
    """Each bad line stands between good ones: it alone is missing, and is named by file, line and reason."""
    good = line(GOOD[kind])
    bad = nasty(kind)
    for name, raw in bad.items():
        path = tmp_path / "data.jsonl"
        # A zero byte or a line end inside would make several lines of it.
        path.write_bytes(good + b"\n" + raw.replace(b"\n", b"") + b"\n" + good + b"\n")
        found, bad_records = read(kind, [path], path=tmp_path / "bad_records.jsonl")
        assert len(found) == 2, name
        assert (bad_records.good, bad_records.bad + bad_records.left_out, bad_records.records) == (2, 1, 3), name
        (listed,) = map(json.loads, (tmp_path / "bad_records.jsonl").read_text().splitlines())
        assert listed["file"] == str(path)
        assert listed["line"] == 2, name
        assert 0 < len(listed["reason"]) <= 500
    count(f"{kind}: handcrafted bad records set aside", len(bad))


@pytest.mark.parametrize("kind", READERS)
def test_all_of_them_in_one_file(tmp_path, kind):
    good, bad = line(GOOD[kind]), nasty(kind)
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(raw.replace(b"\n", b"") + b"\n" + good + b"\n" for raw in bad.values()))
    found, bad_records = read(kind, [path])
    assert len(found) == bad_records.good == len(bad)
    assert bad_records.records == 2 * len(bad)


# --- whole files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NASTY_FILES)
def test_nasty_files_are_accounted_for_exactly(tmp_path, name, count):
    """Each after a good file: every record of both is good, broken or left out, and what is not good is listed."""
    for kind in READERS:
        folder = tmp_path / kind
        folder.mkdir()
        before = folder / "good.jsonl"
        before.write_bytes((line(GOOD[kind]) + b"\n") * 3)
        path = written(name, folder, line(GOOD[kind]))
        found, bad_records = read(kind, [before, path], path=tmp_path / "bad_records.jsonl")
        good, bad, left_out = expected(name, kind)
        assert (bad_records.good, bad_records.bad, bad_records.left_out) == (3 + good, bad, left_out), kind
        assert len(found) == 3 + good, kind
        if bad + left_out:
            listed = [json.loads(each) for each in (tmp_path / "bad_records.jsonl").read_text().splitlines()]
            assert [each["kind"] for each in listed].count("bad") == bad
            assert len(listed) == bad + left_out
            assert {each["file"] for each in listed} == {str(path)}
            assert all(0 < len(each["reason"]) <= 500 for each in listed)
        count(f"{kind}: handcrafted bad files accounted for", 1)


def test_there_are_enough_of_them():
    assert len(NASTY_FILES) >= 60


@pytest.mark.parametrize("kind", READERS)
def test_all_nasty_files_in_little_memory(tmp_path, kind):
    for name in NASTY_FILES:
        written(name, tmp_path, line(GOOD[kind]))
    wanted = [sum(parts) for parts in zip(*(expected(name, kind) for name in NASTY_FILES), strict=True)]
    found, good, bad, left_out, _ = read_limited(kind, tmp_path)
    assert found == good
    assert [good, bad, left_out] == wanted


@pytest.mark.parametrize("kind", READERS)
def test_a_folder_with_a_file_s_name_is_no_file(tmp_path, kind):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "good.jsonl").write_bytes((line(GOOD[kind]) + b"\n") * 3)
    found, bad_records = read(kind, [tmp_path])
    assert (len(found), bad_records.records) == (3, 3)


def test_a_cut_archive_gives_what_came_before_and_says_that_the_rest_is_lost(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    rng = random.Random(0)
    rows = [{"text": f"{index} " + "".join(rng.choices("abcdefgh ", k=60))} for index in range(3000)]
    packed = gzip.compress(b"".join(line(row) + b"\n" for row in rows))
    path.write_bytes(packed[: len(packed) // 2])
    found, bad_records = read("documents", [path], path=tmp_path / "bad_records.jsonl")
    assert [document.text for document in found] == [row["text"] for row in rows[: len(found)]]
    assert 1000 < len(found) < 2000
    assert bad_records.bad == 1
    assert "what follows in the file is not read" in (tmp_path / "bad_records.jsonl").read_text()


@pytest.mark.parametrize("name", ["pipe.jsonl", "device.jsonl", "socket.jsonl", "loop.jsonl", "gone.jsonl"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, name):
    import socket

    path = tmp_path / name
    if name.startswith("pipe"):
        os.mkfifo(path)
    elif name.startswith("device"):
        path.symlink_to("/dev/zero")
    elif name.startswith("socket"):
        socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))
    elif name.startswith("loop"):
        path.symlink_to(path)
    for reader in READERS.values():
        with pytest.raises(UserError):
            list(reader([path]))


def test_a_pipe_put_in_a_file_s_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with raises_user_error(where="a.jsonl", wanted="an ordinary file"), files.open_data(tmp_path / "a.jsonl"):
        pass


# --- how many are too many -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "stops"), [(0, False), (1, False), (2, True), (50, True)])
def test_more_than_one_in_a_hundred_is_an_error_by_default(tmp_path, bad, stops):
    path = tmp_path / "data.jsonl"
    path.write_bytes(line(GOOD["documents"]) * 0 + b"".join(
        (b"{broken" if index < bad else line({"text": f"{index}"})) + b"\n" for index in range(100)
    ))  # fmt: skip
    bad_records = BadRecords()
    reading = READERS["documents"]([path], bad_records=bad_records)
    if stops:
        with pytest.raises(UserError, match=rf"{bad} of 100 records are broken.*data\.jsonl:1.*data.max_bad_fraction="):
            list(reading)
    else:
        assert len(list(reading)) == 100 - bad
        assert bad_records.bad == bad


def test_a_run_lists_what_it_left_out(tmp_path, toy, server, stages):
    recipe, words = stages["pretrain"]
    data = tmp_path / "data.jsonl"
    raw = (toy / "pretrain.jsonl").read_bytes().splitlines(keepends=True)
    data.write_bytes(b"".join([*raw[:200], b"{broken\n", *raw[200:]]))
    out = tmp_path / "run"
    words = [word for word in words if not word.startswith("data.train")]
    status, _, said = server.run(recipe, [*words, f"data.train={data}", f"out={out}"])
    assert status == 0, said
    assert "of 401 records 1 are broken" in said
    (listed,) = map(json.loads, (out / "bad_records.jsonl").read_text().splitlines())
    assert (listed["file"], listed["line"], listed["kind"]) == (str(data), 201, "bad")
    data.write_bytes(b"".join([*raw[:50], *[b"{broken\n"] * 5]))
    status, _, said = server.run(recipe, [*words, f"data.train={data}", f"out={tmp_path / 'other'}"])
    assert status == 2
    assert "records are broken" in said


# --- generated -------------------------------------------------------------------------------------------------------

PIECES = [
    b'{"text": "a"}', b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    b'{"prompt": "a", "chosen": "b", "rejected": "c"}', b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u", b"\\ud800", b",",
    b":", b"null", b"NaN", b"-", b"1e999", b"9" * 5000, b"\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xe4\xbd",
    b" ", b"<|endoftext|>", b"role", b"content", b'{"conversations": ', b'"from": "human"', b'"value": ""', b"[[[[",
    b"text,",
]  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("examples", by_chance(500))
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".csv"])
def test_generated_files(tmp_path_factory, suffix, count, examples):
    folder = tmp_path_factory.mktemp("generated")
    seen = [0]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=12)), max_size=14).map(b"".join))
    def check(raw):
        path = folder / f"data{suffix}"
        path.write_bytes(raw)
        for kind, reader in READERS.items():
            bad_records = BadRecords(max_bad_fraction=1.0)
            try:
                found = list(reader([path], bad_records=bad_records))
            except UserError as error:
                assert "\n" not in error.line()
                assert bad_records.good == 0 or suffix == ".txt", "with one good record it is no error"
                found = []
            else:
                assert bad_records.good >= 1
            assert len(found) <= 2 * bad_records.good
            if suffix == ".jsonl" and bad_records.good and not raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                lines = raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")
                filled = sum(bool(each.strip(b" \t\r\n\x0b\x0c\x1c\x1d\x1e\x1f\x85")) for each in lines)
                if lines[0].strip() != b"{":
                    assert bad_records.records <= max(1, filled) + 1, kind
        seen[0] += 1

    check()
    assert seen[0] >= examples
    count(f"generated {suffix} files, to each of four readers", seen[0])


# --- in little memory ------------------------------------------------------------------------------------------------

LIMITED = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from pathlib import Path
from penjing.base.process_info import peak_resident_bytes
from penjing.data import formats as records
kind, path = sys.argv[1:]
bad_records = records.BadRecords(max_bad_fraction=1.0)
found = 0
for _ in getattr(records, "read_" + kind)([Path(path)], bad_records=bad_records):
    found += 1
peak = peak_resident_bytes()
print(json.dumps([found, bad_records.good, bad_records.bad, bad_records.left_out, peak]))
"""


def read_limited(kind, path):
    """(records, good, bad, left out, peak bytes), in a process with 2 GiB of address space."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, kind, str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_a_line_of_200_megabytes(tmp_path, kind):
    good = line(GOOD[kind])
    path = tmp_path / "long.jsonl"
    with open(path, "wb") as stream:
        stream.write(good + b"\n" + b'{"text": "')
        for _ in range(200):
            stream.write(b"x" * 1_000_000)
        stream.write(b'"}\n' + good + b"\n")
    found, kept, bad, _, peak = read_limited(kind, path)
    assert (found, kept, bad) == (2, 2, 1)
    assert peak < 400e6


@pytest.mark.timeout(900)
def test_an_array_with_a_value_of_200_megabytes_and_a_bomb(tmp_path):
    path = tmp_path / "long.json"
    with open(path, "wb") as stream:
        stream.write(b'[{"text": "a"}, {"text": "')
        for _ in range(200):
            stream.write(b"x" * 1_000_000)
        stream.write(b'"}]')
    found, kept, bad, _, peak = read_limited("documents", path)
    assert (found, kept, bad) == (1, 1, 1)
    assert peak < 1e9
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as stream:
        stream.write(b'{"text": "a"}\n')
        for _ in range(500):
            stream.write(bytes(1_000_000))
    assert bomb.stat().st_size < 1_000_000
    found, kept, bad, _, peak = read_limited("documents", bomb)
    assert (found, kept, bad) == (1, 1, 1)
    assert peak < 500e6


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(line({"text": f"{index}"}) + b"\n" for index in range(100_000)))
    bad_records = BadRecords(max_bad_fraction=1.0)
    reading = records.read_documents([path], bad_records=bad_records)
    first = [next(reading) for _ in range(10)]
    os.truncate(path, 500_000)
    rest = list(reading)
    assert len(first) + len(rest) == bad_records.good
    assert bad_records.bad <= 1


def test_many_small_files(tmp_path):
    for index in range(2000):
        (tmp_path / f"{index:05}.jsonl").write_bytes(b"{broken" if index % 100 == 0 else line({"text": str(index)}))
    before = len(os.listdir("/proc/self/fd"))
    found, bad_records = read("documents", [tmp_path])
    assert (len(found), bad_records.bad) == (1980, 20)
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nswap == 0


def test_real_files_have_no_roles_out_of_order():
    folder = Path(__file__).parents[2] / "../shared/data/sft"
    if not folder.is_dir():
        pytest.skip("the real files of ../shared/data are not here")
    bad_records = BadRecords()
    found = sum(1 for _ in records.read_chats(sorted(path for path in folder.iterdir() if path.is_file()),
                                              bad_records=bad_records))  # fmt: skip
    assert found > 30_000
    assert bad_records.bad == 0
