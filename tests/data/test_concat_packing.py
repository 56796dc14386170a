"""Rows of T tokens: nothing is lost, doubled or out of place, and the same row is the same anywhere."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.data.packing.concat import ConcatRows, Order, PackedRows, Row, Rows, best_fit
from penjing.data.token_shards import TokenShards, TokenShardWriter

END = 0  # the end-of-text token


def write_documents(folder: Path, lengths: list[int]) -> TokenShards:
    """Documents of the given lengths; no token stands twice, so that every place can be told from every other."""
    writer = TokenShardWriter(folder, kind="documents", vocab_size=1 << 20, about={})
    start = 1
    for length in lengths:
        writer.add(range(start, start + length), length)
        start += length
    return writer.close()


def write_chats(folder: Path, lengths: list[int]) -> TokenShards:
    writer = TokenShardWriter(folder, kind="chats", vocab_size=1 << 20, about={})
    start = 1
    for length in lengths:
        writer.add(range(start, start + length), length, [token % 3 == 0 for token in range(start, start + length)])
        start += length
    return writer.close()


def epoch_of(rows: Rows, epoch: int) -> list[Row]:
    first = epoch * rows.rows_per_epoch
    return [rows.row(index) for index in range(first, first + rows.rows_per_epoch)]


def same(left: Row, right: Row) -> bool:
    names = ("ids_T", "target_T", "document_T", "weight_T")
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


# ---------------------------------------------------------------------------------------------------------- the stream

LENGTHS = [3, 1, 12, 7, 1, 30, 2, 5]


@pytest.fixture
def documents(tmp_path: Path) -> TokenShards:
    return write_documents(tmp_path / "documents", LENGTHS)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seq_len=st.integers(1, 24), seed=st.integers())
@settings(max_examples=40)
def test_a_stream_is_its_documents_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, seed: int
) -> None:
    shards = write_documents(tmp_path_factory.mktemp("shards") / "a", lengths)
    if sum(lengths) + len(lengths) <= seq_len:
        with raises_user_error(where="/a", got=f"{sum(lengths)} tokens"):
            ConcatRows(shards, seq_len, end_of_text=END, seed=seed)
        return
    rows = ConcatRows(shards, seq_len, end_of_text=END, seed=seed)
    texts = {
        int(shards.token_N[start]): shards.token_N[start:end]
        for start, end in zip(shards.start_D, shards.end_D, strict=True)
    }
    for epoch in (0,):
        inputs, targets, numbers = [], [], []
        for row in epoch_of(rows, epoch):
            assert len(row.ids_T) == len(row.target_T) == len(row.document_T) == seq_len
            assert row.weight_T.tolist() == [1.0] * seq_len
            inputs += row.ids_T.tolist()
            targets += row.target_T.tolist()
            numbers += row.document_T.tolist()
        # Each target is the token after its input, across rows as well; only the last one is the start of the tail.
        assert targets[:-1] == inputs[1:]
        # A document opens with the end-of-text token, its number changes there and nowhere else.
        opens = [place for place, token in enumerate(inputs) if token == END]
        assert opens == [place for place, number in enumerate(numbers) if place == 0 or number != numbers[place - 1]]
        # All documents but the cut tail are there, whole, once.
        stream = [*inputs, targets[-1]]
        found: list[list[int]] = []
        for token in stream:
            if token == END:
                found.append([])
            else:
                found[-1].append(token)
        left = sum(lengths) + len(lengths) - len(stream)
        assert 0 <= left < seq_len
        firsts = [text[0] for text in found if text]
        assert len(set(firsts)) == len(firsts)
        for text in found[:-1]:
            assert text == texts[text[0]].tolist()
        assert found[-1] == (texts[found[-1][0]][: len(found[-1])].tolist() if found[-1] else [])
        # Every token is a target once; only the stream's first and the tail's are none.
        assert len(set(targets) - {END}) == len([token for token in targets if token != END])
        assert len(targets) == rows.rows_per_epoch * seq_len
    assert rows.padding_per_epoch == 0


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seq_len=st.integers(1, 24), seed=st.integers())
@settings(max_examples=40)
def test_later_epochs_are_a_stretch_of_the_ring(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, seed: int
) -> None:
    shards = write_documents(tmp_path_factory.mktemp("shards") / "a", lengths)
    if sum(lengths) + len(lengths) <= seq_len:
        return
    ring = set()
    for start, end in zip(shards.start_D, shards.end_D, strict=True):
        sequence = [END, *shards.token_N[start:end].tolist(), END]
        ring |= set(pairwise(sequence))
    for order in ("shuffled", "as_given"):
        rows = ConcatRows(shards, seq_len, end_of_text=END, seed=seed, order=order)  # type: ignore[arg-type]
        for epoch in (1, 2):
            made = epoch_of(rows, epoch)
            pairs = [pair for row in made for pair in zip(row.ids_T.tolist(), row.target_T.tolist(), strict=True)]
            assert set(pairs) <= ring and len(set(pairs)) == len(pairs)
            for row in made:
                opens = (row.ids_T[1:] == END).tolist()
                assert opens == (row.document_T[1:] != row.document_T[:-1]).tolist()


def test_one_long_text_is_cut_elsewhere_in_every_epoch(tmp_path: Path) -> None:
    rows = ConcatRows(write_documents(tmp_path / "a", [1000]), 16, end_of_text=END, seed=3)
    assert len({int(rows.row(epoch * rows.rows_per_epoch).ids_T[0]) for epoch in range(8)}) > 3


@pytest.mark.parametrize("order", ["fixed", "as_given"])
def test_held_out_rows_and_a_curriculum_keep_the_given_order(documents: TokenShards, order: Order) -> None:
    rows = ConcatRows(documents, 4, end_of_text=END, seed=1, order=order)
    assert rows.row(0).ids_T.tolist() == [END, 1, 2, 3]
    assert rows.row(0).target_T.tolist() == [1, 2, 3, END]
    assert rows.row(1).ids_T.tolist() == [END, 4, END, 5]
    assert rows.row(1).document_T.tolist() == [1, 1, 2, 2]


def test_another_epoch_has_another_order(documents: TokenShards) -> None:
    rows = ConcatRows(documents, 6, end_of_text=END, seed=1)
    assert not all(map(same, epoch_of(rows, 0), epoch_of(rows, 1)))


# ----------------------------------------------------------------------------------------------------------- best fit

CHATS = [9, 3, 16, 4, 4, 11, 2, 6, 17, 5]
ROW = 16  # holds a chat of 17 tokens: its last token is a target only


@pytest.fixture
def chats(tmp_path: Path) -> TokenShards:
    return write_chats(tmp_path / "chats", CHATS)


@pytest.mark.parametrize("epoch", [0, 3])
def test_every_chat_is_whole_and_there_once(chats: TokenShards, epoch: int) -> None:
    rows = PackedRows(chats, ROW, end_of_text=END, seed=2)
    assert chats.weight_N is not None
    found, padding, taught = [], 0, 0.0
    for row in epoch_of(rows, epoch):
        assert len(row.ids_T) == ROW
        for number in np.unique(row.document_T):
            places = np.flatnonzero(row.document_T == number)
            if number < 0:
                padding += len(places)
                assert not row.weight_T[places].any()
                assert (row.ids_T[places] == END).all()
                assert places[-1] == ROW - 1, "padding stands at the end of a row"
                continue
            assert places.tolist() == list(range(places[0], places[-1] + 1)), "a chat is in one piece"
            tokens = [*row.ids_T[places], row.target_T[places[-1]]]
            assert tokens[1:] == row.target_T[places].tolist()
            # The weight of a position is that of its target.
            assert row.weight_T[places].tolist() == [float(token % 3 == 0) for token in tokens[1:]]
            found.append([int(token) for token in tokens])
        taught += float(row.weight_T.sum())
    expected = [chats.token_N[start:end].tolist() for start, end in zip(chats.start_D, chats.end_D, strict=True)]
    assert sorted(found) == expected
    assert padding == rows.padding_per_epoch
    assert taught == chats.weight_N.sum() - chats.weight_N[chats.start_D].sum()  # the first token is no target


def test_every_epoch_takes_the_rows_in_another_order(chats: TokenShards) -> None:
    rows = PackedRows(chats, ROW, end_of_text=END, seed=2)
    orders = [[int(row.ids_T[0]) for row in epoch_of(rows, epoch)] for epoch in range(4)]
    assert len(set(map(tuple, orders))) > 1
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_chats_made_for_longer_rows_are_a_clear_error(chats: TokenShards) -> None:
    with raises_user_error(where="chats", got="16 tokens"):
        PackedRows(chats, 15, end_of_text=END, seed=2)


def test_no_chats_are_a_clear_error(tmp_path: Path) -> None:
    with raises_user_error(where="/a", wanted="some of at most 16 tokens"):
        PackedRows(write_chats(tmp_path / "a", []), 16, end_of_text=END, seed=1)


def naive_best_fit(lengths: list[int], capacity: int) -> int:
    """The textbook's: longest first, each into the fullest bin it fits; returns the number of bins."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(
    sizes=st.integers(1, 70).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(0, capacity), max_size=60))
    )
)
def test_best_fit_is_the_textbooks(sizes: tuple[int, list[int]]) -> None:
    capacity, lengths = sizes
    bins = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(source for one in bins for source in one) == list(range(len(lengths)))
    assert all(sum(lengths[source] for source in one) <= capacity for one in bins)
    assert len(bins) == naive_best_fit(lengths, capacity)


# ------------------------------------------------------------------------------------------------------ pure functions


@pytest.mark.parametrize("kind", [ConcatRows, PackedRows])
def test_rows_are_a_pure_function_of_their_place(
    kind: type[ConcatRows] | type[PackedRows], documents: TokenShards, chats: TokenShards
) -> None:
    shards = documents if kind is ConcatRows else chats
    rows, twin = (kind(shards, ROW, end_of_text=END, seed=7) for _ in range(2))
    places = list(range(3 * rows.rows_per_epoch))
    in_order = [rows.row(place) for place in places]
    random.Random(0).shuffle(places)
    assert all(same(twin.row(place), in_order[place]) for place in places)
    other = kind(shards, ROW, end_of_text=END, seed=8)
    assert not all(same(other.row(place), in_order[place]) for place in places)
