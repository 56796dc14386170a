"""Rows of whole documents: full, nothing twice, hardly anything cut, and the same as cut from each document plainly."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.data.packing.best_fit import BLOCK_ROWS, BestFitRows, build_layout
from penjing.data.packing.concat import Row
from penjing.data.token_shards import TokenShards, TokenShardWriter
from penjing.data.tokenizer.bpe_dropout import BpeDropout
from penjing.data.tokenizer.tokenizer import Tokenizer

END = 0  # the end-of-text token
Segments = list[tuple[int, int, int]]


def write_documents(folder: Path, lengths: list[int], vocab_size: int = 1 << 20) -> TokenShards:
    """Documents of the given lengths; no token stands twice, so that every position can be told from every other."""
    writer = TokenShardWriter(folder, kind="documents", vocab_size=vocab_size, about={})
    start = 1
    for length in lengths:
        writer.add(range(start, start + length), length)
        start += length
    return writer.close()


def plain_sequences(shards: TokenShards) -> list[list[int]]:
    """Every document between two end-of-text tokens."""
    ends = shards.end_D.tolist()
    return [[END, *shards.token_N[start:end].tolist(), END] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def layout(lengths: list[int], seq_len: int) -> list[Segments]:
    """The rows that `build_layout` makes of documents of these many positions."""
    segments, first = build_layout(np.array(lengths, dtype=np.int64), seq_len)
    assert first[0] == 0 and first[-1] == len(segments)
    return [
        [(int(document), int(start), int(length)) for document, start, length in segments[begin:end]]
        for begin, end in pairwise(first)
    ]


def layout_of(rows: BestFitRows) -> list[Segments]:
    return layout((rows.shards.end_D - rows.shards.start_D + 1).tolist(), rows.seq_len)


def epoch_of(rows: BestFitRows, epoch: int) -> list[Row]:
    first = epoch * rows.rows_per_epoch
    return [rows.row(index) for index in range(first, first + rows.rows_per_epoch)]


def same(left: Row, right: Row) -> bool:
    names = ("ids_T", "target_T", "document_T", "weight_T")
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


def key(row: Row) -> tuple[int, ...]:
    """What tells a row from every other."""
    return (*row.ids_T.tolist(), int(row.target_T[-1]))


def realistic(seed: int, count: int, middle: float, spread: float) -> list[int]:
    """Lengths as texts have them: many of about the same size, a few that are much longer."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return np.maximum(2, generator.lognormal(np.log(middle), spread, count).astype(np.int64)).tolist()  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------- the layout


def check_layout(lengths: list[int], seq_len: int) -> list[Segments]:
    rows = layout(lengths, seq_len)
    seen = [np.zeros(length, dtype=np.int64) for length in lengths]
    for segments in rows:
        assert sum(length for _, _, length in segments) == seq_len, "every row is full"
        for document, start, length in segments:
            assert length > 0 and 0 <= start <= start + length <= lengths[document]
            seen[document][start : start + length] += 1
    assert all(counts.max() <= 1 for counts in seen), "no position twice"
    left_out = sum(int((counts == 0).sum()) for counts in seen)
    assert 0 <= left_out < seq_len and left_out == sum(lengths) - len(rows) * seq_len
    return rows


@given(
    sizes=st.integers(1, 40).flatmap(
        lambda seq_len: st.tuples(
            st.just(seq_len), st.lists(st.integers(1, max(1, 3 * seq_len)), min_size=1, max_size=80)
        )
    )
)
@settings(max_examples=300, deadline=None)
def test_every_row_is_full_and_every_position_there_once(sizes: tuple[int, list[int]]) -> None:
    seq_len, lengths = sizes
    check_layout(lengths, seq_len)


@given(
    seed=st.integers(0, 1 << 30),
    seq_len=st.integers(1, 12),
    count=st.integers(1, 1500),
    longest=st.sampled_from([1, 3, 12, 30, 5000]),
)
@settings(max_examples=40, deadline=None)
def test_blocks_hand_on_what_is_left(seed: int, seq_len: int, count: int, longest: int) -> None:
    """Many blocks, and documents longer than a block or exactly as long as a row."""
    roll = random.Random(seed)
    lengths = [roll.choice((1, seq_len, roll.randint(1, longest))) for _ in range(count)]
    while sum(lengths) > 40 * BLOCK_ROWS * seq_len:
        lengths.pop()
    check_layout(lengths or [1], seq_len)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_document_longer_than_several_blocks(at: int) -> None:
    lengths = [5, 7]
    lengths.insert(at, 3 * BLOCK_ROWS * 8 + 3)
    rows = check_layout(lengths, 8)
    assert len(rows) == (sum(lengths)) // 8


def cut_short(lengths: list[int], rows: list[Segments], seq_len: int) -> int:
    """How many documents that a row could hold are not in one row whole."""
    whole = {document for segments in rows for document, _, length in segments if length == lengths[document]}
    return sum(length <= seq_len and document not in whole for document, length in enumerate(lengths))


@pytest.mark.parametrize(
    ("middle", "spread", "seq_len", "kept"),
    [(120, 0.5, 256, 0.985), (60, 0.9, 256, 0.985), (400, 1.0, 512, 0.982), (20, 0.5, 512, 0.985)],
    ids=["stories", "mixed", "articles", "lines"],
)
def test_documents_stay_whole_but_for_few(middle: float, spread: float, seq_len: int, kept: float) -> None:
    lengths = realistic(1, 6000, middle, spread)
    rows = check_layout(lengths, seq_len)
    fitting = sum(length <= seq_len for length in lengths)
    assert 1 - cut_short(lengths, rows, seq_len) / fitting >= kept
    # A plain stream cuts far more.
    ends = np.cumsum(lengths)
    starts = ends - lengths
    crossed = (starts // seq_len != (ends - 1) // seq_len) & (np.array(lengths) <= seq_len)
    assert cut_short(lengths, rows, seq_len) < crossed.sum() / 3


def test_where_no_two_fit_one_stays_whole_in_each_row() -> None:
    """No layout without padding does better: a row of 256 holds one document of 150 and a piece."""
    lengths = [150] * 2560
    rows = check_layout(lengths, 256)
    assert len(rows) == 1500 and cut_short(lengths, rows, 256) <= 2560 - 1500 + 5


def test_where_all_fit_none_is_cut() -> None:
    lengths = [6, 4] * 50 + [10] * 20
    assert cut_short(lengths, check_layout(lengths, 10), 10) == 0


def test_a_long_document_is_cut_every_row() -> None:
    rows = check_layout([27, 3], 10)
    pieces = sorted(segment for segments in rows for segment in segments if segment[0] == 0)
    assert pieces == [(0, 0, 10), (0, 10, 10), (0, 20, 7)] and len(rows) == 3


def test_rows_keep_to_the_order_of_the_documents() -> None:
    """What a row holds comes from about where the row stands in the files: within a block, but for the few pieces that
    one block leaves to the next."""
    seq_len = 32
    lengths = realistic(2, 9000, 14, 0.6)
    rows = check_layout(lengths, seq_len)
    assert len(rows) > 15 * BLOCK_ROWS
    begins = np.cumsum(lengths) - lengths
    off = np.array(
        [
            abs((begins[document] + start) / seq_len - index)
            for index, segments in enumerate(rows)
            for document, start, _ in segments
        ]
    )
    assert (off > BLOCK_ROWS + 2).mean() < 0.01 and off.max() < 4 * BLOCK_ROWS


# ------------------------------------------------------------------------------------------------------------ the rows


def plain_row(segments: Segments, sequences: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    """The slow twin: ids, targets and document numbers, one position at a time."""
    ids, targets, numbers = [], [], []
    for number, (document, start, length) in enumerate(segments):
        for position in range(start, start + length):
            ids.append(sequences[document][position])
            targets.append(sequences[document][position + 1])
            numbers.append(number)
    return ids, targets, numbers


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    seq_len=st.integers(1, 24),
    vocabulary=st.sampled_from([1 << 10, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_the_plain_twin(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, vocabulary: int
) -> None:
    shards = write_documents(tmp_path_factory.mktemp("shards") / "a", lengths, vocabulary)
    if sum(lengths) + len(lengths) < seq_len:
        with raises_user_error(where="/a", got=f"{sum(lengths)} tokens"):
            BestFitRows(shards, seq_len, end_of_text=END, seed=0)
        return
    rows = BestFitRows(shards, seq_len, end_of_text=END, seed=0, order="fixed")
    sequences = plain_sequences(shards)
    made = epoch_of(rows, 0)
    assert len(made) == len(layout_of(rows))
    for row, segments in zip(made, layout_of(rows), strict=True):
        twin = plain_row(segments, sequences)
        assert (row.ids_T.tolist(), row.target_T.tolist(), row.document_T.tolist()) == twin


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20), seq_len=st.integers(1, 24), seed=st.integers())
@settings(max_examples=60, deadline=None)
def test_rows_show_each_position_of_the_text_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, seed: int
) -> None:
    """From the rows alone, knowing nothing of the layout: every (token, next token) is one of the text's, once."""
    shards = write_documents(tmp_path_factory.mktemp("shards") / "a", lengths)
    total = sum(lengths) + len(lengths)
    if total < seq_len:
        return
    rows = BestFitRows(shards, seq_len, end_of_text=END, seed=seed)
    wanted = {pair for sequence in plain_sequences(shards) for pair in pairwise(sequence)}
    for epoch in (0, 1):
        found = []
        for row in epoch_of(rows, epoch):
            assert {len(row.ids_T), len(row.target_T), len(row.document_T), len(row.weight_T)} == {seq_len}
            assert row.weight_T.tolist() == [1.0] * seq_len and row.weight_T.dtype == np.float32
            assert row.ids_T.dtype == row.target_T.dtype == row.document_T.dtype == np.int64
            ids, targets, numbers = row.ids_T.tolist(), row.target_T.tolist(), row.document_T.tolist()
            found += zip(ids, targets, strict=True)
            for place in range(1, seq_len):
                inside = numbers[place] == numbers[place - 1]
                # Inside a segment the target is the next input; a document opens with the end-of-text token.
                assert not inside or (targets[place - 1] == ids[place] != END)
                assert inside or numbers[place] == numbers[place - 1] + 1
        assert len(found) == len(set(found)) == rows.rows_per_epoch * seq_len
        assert set(found) <= wanted and len(wanted) - len(found) < seq_len
    assert rows.padding_per_epoch == 0


# ----------------------------------------------------------------------------------------------------------- the order


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Enough for a little more than two blocks of rows of 8."""
    return write_documents(tmp_path_factory.mktemp("whole") / "documents", realistic(3, 1100, 3, 0.7))


def orders(documents: TokenShards, order: str, seed: int = 4, epochs: int = 3) -> list[list[int]]:
    """For each epoch, which row of the layout stands at each place."""
    fixed = BestFitRows(documents, 8, end_of_text=END, seed=99, order="fixed")
    number = {key(row): index for index, row in enumerate(epoch_of(fixed, 0))}
    assert len(number) == fixed.rows_per_epoch > 2 * BLOCK_ROWS
    rows = BestFitRows(documents, 8, end_of_text=END, seed=seed, order=order)  # type: ignore[arg-type]
    rows.repacks = False
    found = [[number[key(row)] for row in epoch_of(rows, epoch)] for epoch in range(epochs)]
    assert all(sorted(places) == list(range(fixed.rows_per_epoch)) for places in found), "all rows, once an epoch"
    return found


def test_shuffled_draws_a_new_order_of_all_rows_each_epoch(documents: TokenShards) -> None:
    found = orders(documents, "shuffled")
    assert len(set(map(tuple, found))) == 3
    for places in found:
        moved = np.abs(np.array(places) - np.arange(len(places)))
        assert moved.mean() > len(places) / 5, "from anywhere to anywhere"


def test_as_given_changes_places_within_a_block_only(documents: TokenShards) -> None:
    found = orders(documents, "as_given")
    assert len(set(map(tuple, found))) == 3
    for places in found:
        for first in range(0, len(places), BLOCK_ROWS):
            block = places[first : first + BLOCK_ROWS]
            assert sorted(block) == list(range(first, first + len(block)))
            assert len(block) < 20 or block != sorted(block)


def test_fixed_changes_nothing(documents: TokenShards) -> None:
    assert orders(documents, "fixed") == [sorted(places) for places in orders(documents, "shuffled")]
    assert orders(documents, "fixed", seed=5) == orders(documents, "fixed", seed=6)


@pytest.mark.parametrize("order", ["shuffled", "as_given"])
def test_a_novel_is_cut_elsewhere_in_every_epoch(tmp_path: Path, order: str) -> None:
    novel = write_documents(tmp_path / "a", [5, 1000, 3])
    rows = BestFitRows(novel, 16, end_of_text=END, seed=3, order=order)  # type: ignore[arg-type]
    cuts = []
    for epoch in range(4):
        made = epoch_of(rows, epoch)
        assert len({key(row) for row in made}) == rows.rows_per_epoch
        cuts.append({int(row.ids_T[0]) for row in made})
    for epoch, others in enumerate(cuts):
        assert all(len(others & cuts[other]) < 10 for other in range(epoch)), "of 63 cuts"


def test_as_given_follows_the_files(documents: TokenShards) -> None:
    """For a curriculum: a text from the first tenth of the files is not met in the last half of the epoch."""
    rows = BestFitRows(documents, 8, end_of_text=END, seed=1, order="as_given")
    tenth = documents.num_tokens // 10
    places = [
        place
        for place, row in enumerate(epoch_of(rows, 0))
        if 0 < row.ids_T.min(where=row.ids_T > 0, initial=tenth) < tenth
    ]
    assert places and max(places) < rows.rows_per_epoch / 2


# ------------------------------------------------------------------------------------------------------ pure functions


@pytest.mark.parametrize("order", ["shuffled", "as_given", "fixed"])
def test_rows_are_a_pure_function_of_their_place(documents: TokenShards, order: str) -> None:
    rows = BestFitRows(documents, 8, end_of_text=END, seed=7, order=order)  # type: ignore[arg-type]
    twin = BestFitRows(TokenShards(documents.folder), 8, end_of_text=END, seed=7, order=order)  # type: ignore[arg-type]
    places = list(range(2 * rows.rows_per_epoch))
    in_order = [rows.row(place) for place in places]
    jumps = random.Random(0).sample(places, 60)
    assert all(same(twin.row(place), in_order[place]) for place in jumps)
    other = BestFitRows(documents, 8, end_of_text=END, seed=8, order=order)  # type: ignore[arg-type]
    assert all(same(other.row(place), in_order[place]) for place in jumps) == (order == "fixed")


def test_the_farthest_epoch_is_as_near_as_the_first(documents: TokenShards) -> None:
    rows = BestFitRows(documents, 8, end_of_text=END, seed=7)
    late = 1_000_000 * rows.rows_per_epoch + 5
    assert same(rows.row(late), BestFitRows(documents, 8, end_of_text=END, seed=7).row(late))


def test_a_row_can_be_changed_without_harm(documents: TokenShards) -> None:
    rows = BestFitRows(documents, 8, end_of_text=END, seed=7)
    before = key(rows.row(3))
    rows.row(3).ids_T[:] = -5
    assert key(rows.row(3)) == before


# ----------------------------------------------------------------------------------------------------------- mistakes


def test_too_little_text_is_a_clear_error(tmp_path: Path) -> None:
    shards = write_documents(tmp_path / "a", [3, 4])
    assert BestFitRows(shards, 9, end_of_text=END, seed=0).rows_per_epoch == 1, "9 positions are one row of 9"
    with raises_user_error(where="/a", got="7 tokens") as caught:
        BestFitRows(shards, 10, end_of_text=END, seed=0)
    assert "data.seq_len" in str(caught.value)


def test_no_text_is_a_clear_error(tmp_path: Path) -> None:
    with raises_user_error(got="0 tokens"):
        BestFitRows(write_documents(tmp_path / "a", []), 1, end_of_text=END, seed=0)


# ------------------------------------------------------------------------------------- tokenized anew each epoch


def bpe_rows(folder: Path, tokenizer: Tokenizer, texts: list[str], dropout: float, num_epochs: float) -> BestFitRows:
    writer = TokenShardWriter(folder, kind="documents", vocab_size=tokenizer.size, about={})
    for text in texts:
        writer.add(tokenizer.encode(text), len(text.encode()))
    rows = BestFitRows(writer.close(), 32, end_of_text=tokenizer.end_of_text, seed=1)
    rows.bpe_dropout = BpeDropout(rows.shards, tokenizer, dropout, num_epochs, seed=1)
    return rows


def test_bpe_dropout_reads_the_same_text_in_other_tokens(
    tokenizer: Tokenizer, corpus: list[str], tmp_path: Path
) -> None:
    rows = bpe_rows(tmp_path, tokenizer, corpus[:60], 0.1, 2)
    plain, number = rows.shards, rows.rows_per_epoch
    draws = [rows.bpe_dropout.epoch(epoch) for epoch in (0, 1)]
    for made in draws:
        parts = zip(made.start_D, made.end_D, strict=True)
        assert [tokenizer.decode(made.token_N[begin:end].tolist()) for begin, end in parts] == corpus[:60]
        assert len(made.token_N) > 1.01 * plain.num_tokens
    assert not np.array_equal(draws[0].token_N, draws[1].token_N)
    again = bpe_rows(tmp_path / "again", tokenizer, corpus[:60], 0.1, 2)
    for index in (2 * number + 1, number, 3, number - 1):  # in any order, from any process
        assert same(rows.row(index), again.row(index))
    without = BestFitRows(plain, 32, end_of_text=tokenizer.end_of_text, seed=1)
    assert all(same(rows.row(index), without.row(index)) for index in range(2 * number, 3 * number))


def test_bpe_dropout_leaves_out_each_merge_with_its_probability(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "the little dog 北京的小狗 " * 20
    none = bpe_rows(tmp_path / "none", tokenizer, [text], 0.0, 1)
    assert none.bpe_dropout.epoch(0).token_N.tolist() == tokenizer.encode(text)
    names = map(tokenizer.token, range(tokenizer.size))
    pair = next(name for name in names if len(name) == 2 and name.isascii() and name.isalpha())
    made = bpe_rows(tmp_path, tokenizer, [f"{pair}1"] * 4000, 0.25, 1).bpe_dropout.epoch(0)
    split = len(made.token_N) - 4000 * len(tokenizer.encode(f"{pair}1"))
    assert split == pytest.approx(1000, abs=4 * math.sqrt(4000 * 0.25 * 0.75))
