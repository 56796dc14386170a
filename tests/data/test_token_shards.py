"""Token ids on disk: what was written is what is read, and anything less is refused by name."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.data.token_shards import META, TokenShards, TokenShardWriter

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 65_535]]


def write(folder: Path, documents: list[list[int]] = DOCUMENTS, vocab_size: int = 65_536) -> TokenShards:
    writer = TokenShardWriter(folder, kind="documents", vocab_size=vocab_size, about={"tokenizer": "abc"})
    for number, ids in enumerate(documents):
        writer.add(ids, num_bytes=10 * (number + 1))
    return writer.close()


def read(shards: TokenShards) -> list[list[int]]:
    bounds = zip(shards.start_D, shards.end_D, strict=True)
    return [shards.token_N[start:end].tolist() for start, end in bounds]


def test_documents_come_back(tmp_path: Path) -> None:
    write(tmp_path / "a")
    shards = TokenShards(tmp_path / "a")
    assert read(shards) == DOCUMENTS
    assert (shards.num_documents, shards.num_tokens, shards.num_bytes) == (3, 7, 60)
    assert shards.bytes_D.tolist() == [10, 20, 30]
    assert shards.weight_N is None
    assert (shards.kind, shards.meta["tokenizer"], shards.meta["text_bytes"]) == ("documents", "abc", 60)
    shards.verify()


@given(documents=st.lists(st.lists(st.integers(0, 99_999), min_size=1, max_size=20), max_size=10))
@settings(max_examples=30)
def test_any_documents_come_back(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    assert read(write(tmp_path_factory.mktemp("shards") / "a", documents, 100_000)) == documents


def test_chats_bring_their_weights(tmp_path: Path) -> None:
    writer = TokenShardWriter(tmp_path / "a", kind="chats", vocab_size=300, about={})
    writer.add([1, 2, 3], 4, [0, 1, 1])
    writer.add([4, 5], 2, [0, 1])
    shards = writer.close()
    assert shards.weight_N is not None
    assert shards.weight_N.tolist() == [0, 1, 1, 0, 1]
    assert read(shards) == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(("vocab_size", "dtype", "size"), [(65_536, "uint16", 14), (65_537, "uint32", 28)])
def test_ids_take_two_bytes_where_they_fit(tmp_path: Path, vocab_size: int, dtype: str, size: int) -> None:
    shards = write(tmp_path / "a", vocab_size=vocab_size)
    assert shards.token_N.dtype == dtype
    assert (tmp_path / "a/tokens.bin").stat().st_size == size
    assert read(shards) == DOCUMENTS


def test_the_fingerprint_is_that_of_the_tokens(tmp_path: Path) -> None:
    first, again, other = write(tmp_path / "a"), write(tmp_path / "b"), write(tmp_path / "c", [*DOCUMENTS, [1]])
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_new_folder_replaces_an_old_one_of_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    assert read(write(tmp_path / "a", [[3]])) == [[3]]
    assert os.listdir(tmp_path) == ["a"]


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["tokens.bin", "ends.npy", "bytes.npy"])
def test_a_cut_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a")
    path = tmp_path / "a" / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with raises_user_error(where=name, got=size - 1, wanted=f"{size} bytes"):
        TokenShards(tmp_path / "a")
    path.unlink()
    with raises_user_error(where=name, wanted=f"{size} bytes"):
        TokenShards(tmp_path / "a")


@pytest.mark.parametrize("name", ["tokens.bin", "ends.npy", "bytes.npy"])
def test_a_flipped_bit_is_found_by_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a")
    path = tmp_path / "a" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: .*checksum"):
        TokenShards(tmp_path / "a").verify()


def test_a_flipped_bit_anywhere_in_the_boundaries_is_found(tmp_path: Path) -> None:
    write(tmp_path / "a")
    path = tmp_path / "a/ends.npy"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with raises_user_error(where="ends.npy", next_step="Remove the folder"):
            TokenShards(tmp_path / "a")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}'])
def test_a_folder_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    with raises_user_error(wanted="shards.json"):
        TokenShards(tmp_path)
    (tmp_path / META).write_text(content)
    with pytest.raises(UserError):
        TokenShards(tmp_path)


def test_a_folder_half_written_is_none(tmp_path: Path) -> None:
    writer = TokenShardWriter(tmp_path / "a", kind="documents", vocab_size=300, about={})
    writer.add([1, 2, 3], 3)
    for folder in (tmp_path / "a", tmp_path / "a.partial"):
        with raises_user_error(wanted="shards.json"):
            TokenShards(folder)
    # What a killed run left is swept away by the next.
    assert read(write(tmp_path / "a", [[7]])) == [[7]]
    assert os.listdir(tmp_path) == ["a"]


def test_a_full_disk_is_a_clear_error_and_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", [[1, 2]])

    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(DiskError):
        write(tmp_path / "a")
    assert read(TokenShards(tmp_path / "a")) == [[1, 2]]
