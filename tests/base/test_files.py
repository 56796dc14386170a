"""Files are whole or not there, whatever goes wrong while they are written."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.files import (
    DiskError,
    atomic_write,
    make_folder,
    printable,
    read_json,
    sha256_file,
    sha256_text,
    write_json,
    write_text,
)
from penjing.base.lock import locked


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("old")
    return path


def assert_untouched(path: Path) -> None:
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name], "a temporary file was left behind"


def half_written(path: Path, error: BaseException) -> None:
    with atomic_write(path) as stream:
        stream.write(b"half")
        raise error


def test_a_whole_write_replaces_the_file_and_makes_its_folders(old: Path, tmp_path: Path) -> None:
    write_text(old, "新")
    assert old.read_bytes() == "新".encode()
    write_text(tmp_path / "b/c/d.txt", "deep")
    assert (tmp_path / "b/c/d.txt").read_text() == "deep"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b"]


def test_the_old_file_stands_until_the_new_one_is_whole(old: Path) -> None:
    with atomic_write(old) as stream:
        stream.write(b"half")
        stream.flush()
        assert old.read_text() == "old"
    assert old.read_text() == "half"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_writer_passes_through(old: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        half_written(old, error)
    assert_untouched(old)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DiskError) as caught:
        write_text(old, "new")
    assert str(old) in str(caught.value) and "\n" not in str(caught.value)
    assert_untouched(old)


def test_a_file_that_may_not_grow_leaves_the_old_one(old: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(UserError, match=r"a\.txt: cannot write: File too large"):
            write_text(old, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_untouched(old)


def test_a_file_where_a_folder_should_be(old: Path) -> None:
    with pytest.raises(DiskError):
        write_text(old / "below.txt", "new")
    assert_untouched(old)


def test_json_comes_back(tmp_path: Path) -> None:
    value = {"名": ["盆景", 1, 2.5, None, True]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "盆景" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_json_without_nan(old: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(old, {"loss": float("nan")})
    assert_untouched(old)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"", None])
def test_unreadable_json_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    for broken in (path, tmp_path):
        with raises_user_error(where=str(broken)):
            read_json(broken)


def test_hashes_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("盆景".encode())
    assert sha256_file(tmp_path / "a") == sha256_text("盆景")
    assert sha256_text("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_folder_is_made_once_and_stays(tmp_path: Path) -> None:
    for _ in range(2):
        make_folder(tmp_path / "a/b")
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_folder_that_cannot_be_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_user_error(where="a.txt"):
        make_folder(old)
    with pytest.raises(DiskError):
        make_folder(old / "b")
    monkeypatch.setattr("penjing.base.files.os.access", lambda path, mode: not mode & os.W_OK)  # root may do anything
    with pytest.raises(DiskError):
        make_folder(old.parent)
    assert_untouched(old)


def test_any_name_can_be_written_down() -> None:
    assert printable(Path("a/中.txt")) == "a/中.txt"
    assert printable(Path(os.fsdecode(b"a/\xd6\xd0.txt"))) == r"a/\xd6\xd0.txt"


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    """The bytes before the name, and the name before `write_text` returns: a power cut leaves the old or the new."""
    path = tmp_path / "a.txt"
    write_text(path, "old")
    log, fsync, replace = [], os.fsync, os.replace

    def synced(handle):
        log.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def replaced(old, new):
        log.append(("replace", Path(old), Path(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_text(path, "new")
    assert path.read_text() == "new"
    (temporary,) = (entry[1] for entry in log if entry[0] == "replace")
    assert log == [("sync", temporary), ("replace", temporary, path), ("sync", tmp_path)]


def test_the_next_owner_of_a_folder_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    left = [tmp_path / ".outcome.json.0123abcd.tmp", tmp_path / "samples/.step-5.json.deadbeef.tmp"]
    others = [tmp_path / name for name in (".mine.tmp", "notes.0123abcd.tmp", ".a.txt.0123ABCD.tmp", "outcome.json")]
    for path in [*left, *others]:
        path.write_text("half")
        os.utime(path, (0, 0))
    with atomic_write(tmp_path / "report.html") as stream:  # another process writes there now
        stream.write(b"whole")
        with locked(tmp_path):
            assert not any(path.exists() for path in left)
    assert all(path.exists() for path in [*others, tmp_path / "report.html"])
