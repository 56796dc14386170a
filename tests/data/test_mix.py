"""Sources in their shares: of every stretch, as a pure function of the place, with a change near the end."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penjing.data.packing.best_fit import BestFitRows
from penjing.data.packing.concat import PackedRows, Rows
from penjing.data.packing.mix import CHUNK, MixedRows, MixedSource
from penjing.data.token_shards import TokenShards, TokenShardWriter

SEQ_LEN = 8


def shards_of(folder: Path, numbers: dict[str, int], kind: str = "documents") -> TokenShards:
    """Documents of each source; a token tells its source."""
    writer = TokenShardWriter(folder, kind=kind, vocab_size=100, about={  # type: ignore[arg-type]
        "split": "train", "sources": {"train": [[name, [name]] for name in numbers]}
    })  # fmt: skip
    rng = random.Random(0)
    for token, (name, count) in enumerate(numbers.items(), start=1):
        for _ in range(count):
            length = (6, 3)[token - 1] if kind == "chats" else rng.randint(1, 30)  # 5 of 8 positions, and all 8
            writer.begin(name, 0.5)
            writer.add([token] * length, length, [0, *[1] * (length - 1)] if kind == "chats" else None)
    return writer.close()


def mixed(shards: TokenShards, weights: list[float], **options: object) -> MixedRows:
    packer: type[Rows] = PackedRows if shards.kind == "chats" else BestFitRows
    sources = [
        MixedSource(name, packer(part, SEQ_LEN, end_of_text=0, seed=3), first) for name, first, part in shards.sources()
    ]
    return MixedRows(sources, weights, seed=5, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return shards_of(tmp_path_factory.mktemp("mix") / "train", {"a": 90, "b": 10, "c": 40})


def source_of(rows: MixedRows, index: int) -> int:
    return int(rows.row(index).ids_T.max()) - 1


def test_sources_of_shards_are_their_documents(shards: TokenShards) -> None:
    assert [(name, first, part.num_documents) for name, first, part in shards.sources()] == [
        ("a", 0, 90), ("b", 90, 10), ("c", 100, 40)
    ]  # fmt: skip
    assert sum(part.num_tokens for _, _, part in shards.sources()) == shards.num_tokens
    assert sum(part.num_bytes for _, _, part in shards.sources()) == shards.num_bytes


@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1, 1, 98], [0, 3, 1], [1, 0, 0]])
def test_every_stretch_has_the_shares(shards: TokenShards, weights: list[float]) -> None:
    rows = mixed(shards, weights)
    for first in (0, 777, CHUNK - 50, 3 * CHUNK):
        found = Counter(source_of(rows, index) for index in range(first, first + 400))
        for number, weight in enumerate(weights):
            assert abs(found[number] / 400 - weight / sum(weights)) < 0.02


def test_counts_are_those_of_the_rows(shards: TokenShards) -> None:
    rows = mixed(shards, [5, 3, 2], final_shares=[0, 0, 1], final_row=CHUNK + 100)
    for number in (0, 1, 500, CHUNK, CHUNK + 100, CHUNK + 321):
        found = np.bincount([rows.place(index)[0] for index in range(number)], minlength=3)
        assert rows.counts(number) == found.tolist()


def test_each_source_goes_through_its_own_stream(shards: TokenShards) -> None:
    rows = mixed(shards, [5, 3, 2])
    places = [rows.place(index) for index in range(2 * CHUNK)]
    for number in range(3):
        assert [own for source, own in places if source == number] == list(range(rows.counts(2 * CHUNK)[number]))


def test_the_last_part_has_other_shares(shards: TokenShards) -> None:
    rows = mixed(shards, [1, 1, 0], final_shares=[0, 0, 1], final_row=1000)
    assert {source_of(rows, index) for index in range(900, 1000)} == {0, 1}
    assert {source_of(rows, index) for index in range(1000, 1100)} == {2}


@pytest.mark.parametrize("final", [{}, {"final_shares": [1, 8, 1], "final_row": 30}])
def test_a_source_stops_after_its_epochs_and_the_others_fill_up(shards: TokenShards, final: dict[str, object]) -> None:
    rows = mixed(shards, [2, 6, 2], max_epochs=[0, 3, 0], **final)
    per_epoch = rows.sources[1].rows.rows_per_epoch
    drawn = [rows.place(index) for index in range(2 * CHUNK)]
    assert [own for source, own in drawn if source == 1] == list(range(3 * per_epoch)), "three epochs, not a row more"
    last = max(index for index, (source, _) in enumerate(drawn) if source == 1)
    found = Counter(source for source, _ in drawn[last + 1 :])
    assert last < 10 * per_epoch and abs(found[0] / found.total() - 0.5) < 0.01
    for number in (1, last, last + 1, CHUNK + 5):
        assert rows.counts(number) == [sum(source == n for source, _ in drawn[:number]) for n in range(3)]
    again = mixed(shards, [2, 6, 2], max_epochs=[0, 3, 0], **final)
    assert [again.place(index) for index in (CHUNK + 7, last, 3)] == [drawn[CHUNK + 7], drawn[last], drawn[3]]


def test_without_another_source_the_limit_does_not_hold(shards: TokenShards) -> None:
    rows = mixed(shards, [1, 3, 0], max_epochs=[1, 1, 0])
    size = [one.rows.rows_per_epoch for one in rows.sources]
    assert rows.counts(size[0] + size[1]) == [size[0], size[1], 0]
    assert sum(rows.counts(CHUNK)) == CHUNK and rows.counts(CHUNK)[2] == 0


def test_rows_are_a_pure_function_of_their_place(shards: TokenShards) -> None:
    rows = mixed(shards, [5, 3, 2], final_shares=[0, 1, 1], final_row=3000)
    in_order = [rows.row(index).ids_T.tolist() for index in range(3 * CHUNK // 2)]
    for index in random.Random(0).sample(range(len(in_order)), 200):
        for other in (mixed(shards, [5, 3, 2], final_shares=[0, 1, 1], final_row=3000), rows.copy()):
            assert other.row(index).ids_T.tolist() == in_order[index]
    assert rows.documents(7) == rows.copy().documents(7)
    for index in range(50):
        tokens = {int(shards.token_N[shards.start_D[document]]) for document in rows.documents(index)}
        assert tokens == {source_of(rows, index) + 1}, "documents are those of all shards"


def test_shares_are_of_tokens_not_of_padded_rows(tmp_path: Path) -> None:
    rows = mixed(shards_of(tmp_path / "train", {"a": 400, "b": 400}, "chats"), [1, 1])
    found: Counter[int] = Counter()
    for index in range(2000):
        row = rows.row(index)
        found[source_of(rows, index)] += int((row.document_T >= 0).sum())
    assert abs(found[0] / sum(found.values()) - 0.5) < 0.02
