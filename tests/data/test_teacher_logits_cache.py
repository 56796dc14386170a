"""A teacher's predictions on disk: every position has its own place, and what is read back is what was written."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.base.files import DiskError
from penjing.data.packing.best_fit import BestFitRows
from penjing.data.packing.concat import PackedRows
from penjing.data.teacher_logits_cache import (
    MIN_LOGPROB,
    CacheKey,
    PositionSlots,
    TeacherLogitsCache,
    TeacherLogitsWriter,
    find,
    fixed_order,
    with_positions,
)
from penjing.data.token_shards import TokenShardWriter

KEY = CacheKey(teacher="t", data="d", layout="l", count=3, num_ids=50, temperature=1.0)
END = 0


def shards(folder, kind, seed=0, documents=40):
    generator = np.random.default_rng(seed)
    writer = TokenShardWriter(folder, kind=kind, vocab_size=50, about={"tokenizer": "x"})
    for _ in range(documents):
        length = int(generator.integers(2, 14))
        weights = generator.integers(0, 2, length) if kind == "chats" else None
        writer.add(generator.integers(1, 50, length), length, weights)
    return writer.close()


def packed(folder, kind, seed=1):
    made = shards(folder, kind)
    if kind == "chats":
        return PackedRows(made, 16, end_of_text=END, seed=seed)
    rows = BestFitRows(made, 16, end_of_text=END, seed=seed)
    rows.repacks = False  # as of rows whose predictions are stored
    return rows


@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_each_prediction_has_a_place_of_its_own_in_every_epoch(tmp_path, kind):
    rows = packed(tmp_path / "s", kind)
    slots, places = PositionSlots(rows.shards), with_positions(rows)
    seen = {}
    targets = sum(int((rows.row(index).weight_T > 0).sum()) for index in range(rows.rows_per_epoch))
    for index in range(2 * rows.rows_per_epoch):
        row, where = rows.row(index), slots.of(places.row(index))
        counts = row.weight_T > 0
        assert len(where) == counts.sum()
        for slot, inside, target in zip(where.tolist(), row.ids_T[counts], row.target_T[counts], strict=True):
            assert 0 <= slot < slots.count
            before = seen.setdefault(slot, (index < rows.rows_per_epoch, inside, target))
            assert before[1:] == (inside, target)
        if index + 1 == rows.rows_per_epoch:
            assert len(seen) == targets
    assert len(seen) == targets


@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_another_seed_changes_the_order_and_not_the_places(tmp_path, kind):
    first = packed(tmp_path / "s", kind, seed=1)
    again = packed(tmp_path / "s", kind, seed=2)
    one, two = with_positions(fixed_order(first)), with_positions(fixed_order(again))
    for index in range(first.rows_per_epoch):
        np.testing.assert_array_equal(one.row(index).target_T, two.row(index).target_T)
    shuffled = {tuple(with_positions(first).row(index).target_T) for index in range(first.rows_per_epoch)}
    assert shuffled == {tuple(one.row(index).target_T) for index in range(first.rows_per_epoch)}


@pytest.mark.parametrize("kind", ["documents", "chats"])
def test_rows_themselves_stay_as_they_are(tmp_path, kind):
    rows = packed(tmp_path / "s", kind)
    before = [rows.row(index).ids_T for index in range(3)]
    with_positions(rows).row(5)
    fixed_order(rows).row(1)
    for index, ids in enumerate(before):
        np.testing.assert_array_equal(rows.row(index).ids_T, ids)


def fill(writer, slots, seed=0):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, writer.key.num_ids, (len(slots), writer.key.count))
    logps = -generator.random((len(slots), writer.key.count + 1)).astype(np.float32) * 9
    writer.write(slots, ids, logps)
    return ids, logps


def test_what_is_written_is_read_back(tmp_path):
    writer = TeacherLogitsWriter(tmp_path, KEY, 20)
    assert writer.begin() == 0
    writer.open()
    order = np.random.default_rng(3).permutation(20)
    ids, logps = fill(writer, order)
    logps[0, -1] = -1e6
    writer.write(order[:1], ids[:1], logps[:1])
    assert find(tmp_path, KEY) is None
    store = writer.finish({"rows": 4})
    got_ids, got_logps = store.read(order)
    np.testing.assert_array_equal(got_ids, ids)
    np.testing.assert_allclose(got_logps[1:], logps[1:], rtol=1e-3)
    assert got_logps[0, -1] == MIN_LOGPROB
    assert find(tmp_path, KEY).slots == 20
    assert not writer.partial.exists()
    store.verify()


def test_two_writers_fill_one_store_and_a_stopped_one_is_gone_on_with(tmp_path):
    first, second = TeacherLogitsWriter(tmp_path, KEY, 20), TeacherLogitsWriter(tmp_path, KEY, 20)
    first.begin()
    first.open()
    second.open()
    one = fill(first, np.arange(0, 20, 2), seed=1)
    two = fill(second, np.arange(1, 20, 2), seed=2)
    first.flush()
    second.flush()
    first.note(7)
    again = TeacherLogitsWriter(tmp_path, KEY, 20)
    assert again.begin() == 7
    again.open()
    store = again.finish({})
    np.testing.assert_array_equal(store.read(np.arange(0, 20, 2))[0], one[0])
    np.testing.assert_array_equal(store.read(np.arange(1, 20, 2))[0], two[0])


def test_a_half_made_store_of_another_size_is_made_anew(tmp_path):
    writer = TeacherLogitsWriter(tmp_path, KEY, 20)
    writer.begin()
    writer.note(5)
    (writer.partial / "ids.bin").write_bytes(b"short")
    assert TeacherLogitsWriter(tmp_path, KEY, 20).begin() == 0


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="nothing is reserved here")
def test_room_for_a_store_is_reserved(tmp_path):
    writer = TeacherLogitsWriter(tmp_path, KEY, 1 << 16)
    writer.begin()
    for name in ("ids.bin", "logps.bin"):
        found = (writer.partial / name).stat()
        assert found.st_blocks * 512 >= found.st_size > 1 << 18


@pytest.mark.parametrize("way", ["said before", "while it is reserved"])
def test_a_full_disk_is_one_line_before_anything_is_mapped(tmp_path, monkeypatch, way):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    if way == "while it is reserved":
        monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    slots = 20 if way == "while it is reserved" else 1 << 56
    with pytest.raises(DiskError):
        TeacherLogitsWriter(tmp_path, KEY, slots).begin()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "other", [{"teacher": "u"}, {"data": "e"}, {"layout": "m"}, {"count": 4}, {"num_ids": 51}, {"temperature": 2.0}]
)
def test_another_of_anything_is_another_store(tmp_path, other):
    writer = TeacherLogitsWriter(tmp_path, KEY, 5)
    writer.begin()
    writer.open()
    writer.finish({})
    assert find(tmp_path, KEY) is not None
    assert find(tmp_path, replace(KEY, **other)) is None


def test_damage_is_named(tmp_path):
    writer = TeacherLogitsWriter(tmp_path, KEY, 5)
    writer.begin()
    writer.open()
    store = writer.finish({})
    path = store.folder / "logps.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b"\x01\x01")
    with pytest.raises(UserError, match=r"logps\.bin.*checksum"):
        store.verify()
    path.write_bytes(whole[:-2])
    with raises_user_error(where="logps.bin", got=38):
        find(tmp_path, KEY)
    path.write_bytes(whole)
    meta = json.loads((store.folder / "teacher.json").read_text())
    meta["key"]["teacher"] = "u"
    (store.folder / "teacher.json").write_text(json.dumps(meta))
    with raises_user_error(next_step="objective.store"):
        TeacherLogitsCache(store.folder, KEY)


def test_ids_beyond_16_bits(tmp_path):
    key = replace(KEY, num_ids=100_000)
    writer = TeacherLogitsWriter(tmp_path, key, 2)
    writer.begin()
    writer.open()
    ids = np.array([[99_999, 70_000, 1], [65_536, 65_535, 0]])
    writer.write(np.arange(2), ids, np.zeros((2, 4), dtype=np.float32))
    np.testing.assert_array_equal(writer.finish({}).read(np.arange(2))[0], ids)


def test_a_data_set_without_a_position_is_an_empty_store(tmp_path):
    writer = TeacherLogitsWriter(tmp_path, KEY, 0)
    writer.begin()
    writer.open()
    assert writer.finish({}).slots == 0
