"""Encoding in bulk gives the ids of the tokenizer, whoever computes them, in bounded memory, and says how far it is."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.data import progress
from penjing.data.corpus import Corpus, DataSettings, Split
from penjing.data.formats import Document
from penjing.data.tokenize_dataset import prepare_documents
from penjing.data.tokenizer import bulk
from penjing.data.tokenizer.bulk import BulkEncoder
from penjing.data.tokenizer.tokenizer import CONTROL_TOKENS, Tokenizer

ANY = st.text(st.characters(exclude_categories=["Cs", "Cn"]))
TEXTS = st.lists(ANY | st.sampled_from([*CONTROL_TOKENS, "  two", "e\u0301", "从前", "1234", "\r\n\t"]), max_size=9)


def ids_of(encoder: BulkEncoder, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in encoder.encode(texts)]


@settings(deadline=None)
@given(texts=TEXTS)
def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer, texts: list[str]) -> None:
    texts.append("".join(texts))
    assert ids_of(BulkEncoder(tokenizer), texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("text", ["ACGT" * 50_000, "\ufeff" * 3, "=" * 100_000, " " * 9999, "龘" * 5000])
def test_text_without_spaces(tokenizer: Tokenizer, text: str) -> None:
    assert ids_of(BulkEncoder(tokenizer), [text]) == [tokenizer.encode(text)]


class Wrong:
    """An encoder that is wrong about texts that hold `what`."""

    def __init__(self, what: str, right: Any) -> None:
        self.what, self.right = what, right

    def encode_batch(self, texts: list[str]) -> Any:
        return self.right.encode_batch([text.replace(self.what, "?") for text in texts])


def count_made(monkeypatch: pytest.MonkeyPatch, what: str = "\0") -> list[str]:
    made: list[str] = []
    real = gigatoken.Tokenizer

    class Maker:
        @staticmethod
        def from_json(definition: str) -> Wrong:
            made.append(definition)
            return Wrong(what, real.from_json(definition))

    monkeypatch.setattr(gigatoken, "Tokenizer", Maker)
    return made


def test_a_difference_is_said_once_and_then_the_slow_encoder_is_used(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_made(monkeypatch, "猫")
    encoder = BulkEncoder(tokenizer)
    assert ids_of(encoder, ["a dog"]) == [tokenizer.encode("a dog")]
    texts = ["a dog", "一只猫"] * 3
    with pytest.warns(UserWarning, match="gigatoken"):
        assert ids_of(encoder, texts[1:2]) == [tokenizer.encode("一只猫")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ids_of(encoder, texts) == [tokenizer.encode(text) for text in texts]


def test_what_gigatoken_cannot_read_is_encoded_all_the_same(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "plain_definition", "{}")
    with pytest.warns(UserWarning, match="cannot read"):
        encoder = BulkEncoder(tokenizer)
    assert ids_of(encoder, ["a dog"]) == [tokenizer.encode("a dog")]


def test_gigatoken_without_its_own_packages_is_not_used(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Wrong("", None)
    encode.encode_batch = lambda texts: [[0] for _ in texts]  # type: ignore[method-assign]
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda definition: encode)
    with pytest.warns(UserWarning, match="gigatoken"):
        encoder = BulkEncoder(tokenizer)
    assert ids_of(encoder, ["a dog"]) == [tokenizer.encode("a dog")]


def test_the_cache_is_thrown_away_again_and_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_made(monkeypatch)
    monkeypatch.setattr(bulk, "RENEW_CHARACTERS", 1000)
    encoder = BulkEncoder(tokenizer)
    for number in range(100):
        assert ids_of(encoder, [f"{number:050}"]) == [tokenizer.encode(f"{number:050}")]
    assert 4 <= len(made) <= 8


def test_shards_are_the_same_without_gigatoken(
    tokenizer: Tokenizer, corpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document(text=text, source="a.txt", line=number) for number, text in enumerate([*corpus[:700], " "])]

    def fingerprints(name: str) -> list[str]:
        split = Split(share=0.1)
        made = prepare_documents(split.placed(documents), tokenizer, tmp_path / name, split=split, about={})
        return [made.train.fingerprint, made.validation.fingerprint]

    fast = fingerprints("fast")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(bulk, "find_spec", lambda name: None)
    assert fingerprints("slow") == fast


def test_progress_follows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOWN_EVERY", 0.0)
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some words here"}\n' * 100)
    shown: list[tuple[float, int]] = []
    corpus = Corpus(DataSettings(train=(str(tmp_path),)), lambda *values: shown.append(values))
    assert len(list(corpus.records())) == 300
    fractions = [fraction for fraction, _ in shown]
    assert fractions == sorted(fractions) and 0.9 < fractions[-1] <= 1
    assert abs(np.interp(150, range(300), fractions) - 0.5) < 0.1
    assert shown[-1][1] == 300 * len("some words here")
    lines: list[str] = []
    list(Corpus(DataSettings(train=(str(tmp_path),)), progress.ProgressLines(lines.append, "reading")).records())
    assert "left" in lines[50] and all(line.startswith("reading") for line in lines)
