"""What is held out of few documents, of files of one's own, and of none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from user_errors import raises_user_error

from penjing.data.corpus import Corpus, DataSettings, place_of, split_documents
from penjing.data.formats import Document

SHARE = 0.01


def documents(texts: Sequence[str]) -> list[Document]:
    return [Document(text=text, source="a.jsonl", line=number) for number, text in enumerate(texts, start=1)]


def book(number: int, characters: int = 50_000) -> str:
    return "".join(f"line {line} of book {number}\n" for line in range(characters // 19))[:characters]


def corpus(folder: Path, texts: Sequence[str], name: str = "a.jsonl", **settings: object) -> Corpus:
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Corpus(DataSettings(train=(str(folder / name),), **settings))  # type: ignore[arg-type]


def halves(one: Corpus) -> tuple[list[str], list[str]]:
    return list(one.texts(held_out=False)), list(one.texts(held_out=True))


@pytest.mark.parametrize("texts", [[book(1)], [book(1)] * 3, [book(number) for number in range(3)], [book(1), "short"]])
def test_the_end_of_a_book_is_held_out_if_a_whole_one_is_too_much(tmp_path: Path, texts: list[str]) -> None:
    learned, held_out = halves(corpus(tmp_path, texts))
    total = sum(map(len, texts))
    assert 0.5 * SHARE < sum(map(len, held_out)) / total < 1.5 * SHARE
    assert sum(map(len, learned)) + sum(map(len, held_out)) == total
    cut = [text for text in learned if text not in texts]
    assert [begin + end for begin, end in zip(cut, held_out, strict=True)] == [
        text for text in texts if text not in learned
    ]
    assert all(begin.endswith("\n") for begin in cut), "after a line"


def test_the_cut_is_said_with_its_place(tmp_path: Path) -> None:
    one = corpus(tmp_path, [book(1), book(2)])
    assert "a.jsonl:" in one.split.note and "data.validation" in one.split.note


def test_of_one_line_without_spaces_the_end_is_held_out(tmp_path: Path) -> None:
    text = "ACGT" * 1000
    assert halves(corpus(tmp_path, [text])) == ([text[:-40]], [text[-40:]])


def test_many_documents_are_held_out_whole_by_their_hash(tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(3000)]
    one = corpus(tmp_path, texts)
    assert one.split.below == SHARE and not one.split.note
    assert halves(one)[1] == [text for text in texts if place_of(text) < SHARE]


def test_what_is_held_out_stays_so_when_data_are_added(tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(3000)]
    before = halves(corpus(tmp_path, texts[:1500]))[1]
    assert before and set(before) <= set(halves(corpus(tmp_path, texts))[1])


def test_a_long_document_below_the_threshold_is_not_held_out_whole() -> None:
    """Three novels among a hundred short texts: by hash alone a novel may be held out."""
    low = next(number for number in range(10_000) if place_of(book(number, 3000)) < SHARE)
    texts = [book(low, 3000), *(f"text number {number}" for number in range(200))]
    split = split_documents(documents(texts), SHARE)
    held_out = [record for record, place in split.placed(documents(texts)) if place < (split.below or 0)]
    assert sum(len(record.text) for record in held_out) <= 3 * SHARE * sum(map(len, texts))
    assert held_out


def test_no_more_is_read_than_is_needed() -> None:
    read = []
    endless = (read.append(number) or Document(text=f"text {number}", source="a", line=1) for number in range(10**9))
    assert split_documents(endless, SHARE).below == SHARE
    assert len(read) < 5000


def test_files_of_ones_own_are_held_out_alone(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "mine"}\n')
    texts = [f"text number {number}" for number in range(500)]
    one = corpus(tmp_path, texts, validation=(str(tmp_path / "held.jsonl"),))
    assert halves(one) == (texts, ["mine"])
    assert one.fingerprint != corpus(tmp_path, texts).fingerprint


def test_held_out_files_are_not_cleaned(tmp_path: Path) -> None:
    """So that runs with different rules are measured on the same texts."""
    (tmp_path / "held.jsonl").write_text('{"text": "mine"}\n' * 2)
    one = corpus(tmp_path, ["a", "a"], validation=(str(tmp_path / "held.jsonl"),), clean=("exact_duplicates",))
    assert halves(one) == (["a"], ["mine", "mine"])


def test_a_held_out_file_in_the_folder_of_the_data_is_not_learned(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "held"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "learned"}\n')
    one = Corpus(DataSettings(train=(str(tmp_path),), validation=(str(tmp_path / "b.jsonl"),)))
    assert halves(one) == (["learned"], ["held"])
    with raises_user_error(where="data.validation"):
        Corpus(DataSettings(train=(str(tmp_path / "a.jsonl"),), validation=(str(tmp_path),))).files  # noqa: B018


def test_nothing_is_held_out(tmp_path: Path) -> None:
    assert halves(corpus(tmp_path, ["only one"], validation=("none",))) == (["only one"], [])


@pytest.mark.parametrize("kind", ["documents", "chats"])
@pytest.mark.parametrize("weights", [(1.0, -1.0), (0.0, 0.0), (float("inf"), 1.0), (1e308, 1e308)])
def test_weights_that_cannot_be(kind: str, weights: tuple[float, ...]) -> None:
    with raises_user_error(where="data.weights"):
        DataSettings(train=("a", "b"), format=kind, weights=weights)  # type: ignore[arg-type]


def test_weights_need_a_source_each_and_a_file_is_in_one(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("text")
    files = tuple(str(tmp_path / f"{name}.txt") for name in "aba")
    with raises_user_error(where="data.weights"):
        Corpus(DataSettings(train=files[:2], weights=(1.0,))).files  # noqa: B018
    for weights in ((), (1.0, 1.0, 1.0)):
        with raises_user_error(where="data.train", got="a.txt"):
            Corpus(DataSettings(train=files, weights=weights)).files  # noqa: B018
    with raises_user_error(where="data.validation"):
        Corpus(DataSettings(train=files[:2], weights=(1.0, 1.0), validation=files[:1])).files  # noqa: B018
    with raises_user_error(where="data.weights"):
        DataSettings(format="prompts", weights=(1.0,))
    with raises_user_error(where="data.final_weights"):
        DataSettings(weights=(1.0, 2.0), final_weights=(1.0,))
