"""Bytes in, bytes out; no text becomes a control token; every engine reads the files alike."""

from __future__ import annotations

import contextlib
import json
import random
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.data.tokenizer import train, training_sample
from penjing.data.tokenizer.tokenizer import CONTROL_TOKENS, SMALLEST_VOCABULARY, Tokenizer
from penjing.data.tokenizer.train import train_tokenizer
from penjing.data.tokenizer.training_sample import sample_texts

# Unassigned characters are left out: which of them compose is a matter of the Unicode version.
ANY = st.text(st.characters(exclude_categories=["Cs", "Cn"]))
PIECES = st.sampled_from(
    [
        *CONTROL_TOKENS,
        *(token[1:] for token in CONTROL_TOKENS),
        *("<", "|", ">", "im_end", "assistant\n", " ", "\n\n"),
        "从前，有一只猫。",
        "naïve café",
        "e\u0301",
        "👩‍👩‍👧",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "def f(x):\n\treturn x**2  # 平方",
        "１２３",
        "1234567890",
        "'ll",
    ]
)
MIXED = st.lists(PIECES | ANY, max_size=12).map("".join)


@given(text=MIXED)
def test_what_is_encoded_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert tokenizer.decode(ids, hide=False) == unicodedata.normalize("NFC", text)
    assert all(0 <= index < tokenizer.size for index in ids)


@given(text=MIXED)
def test_no_text_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    assert not tokenizer.added_ids.intersection(tokenizer.encode(text))


@given(texts=st.lists(MIXED, max_size=4))
def test_many_at_once_are_the_same_as_one_by_one(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


def test_control_tokens_come_first_and_are_reached_by_name(tokenizer: Tokenizer) -> None:
    assert [tokenizer.control(token) for token in CONTROL_TOKENS] == list(range(9))
    assert tokenizer.added_ids == set(range(9))
    assert (tokenizer.end_of_text, tokenizer.message_end) == (0, 2)
    assert [tokenizer.token(index) for index in range(9)] == list(CONTROL_TOKENS)
    with pytest.raises(KeyError):
        tokenizer.control("<|no_such|>")


def test_tokens_that_only_mark_ends_are_hidden(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode("hi"), 3, 2, 0]
    assert tokenizer.decode(ids) == "hi<think>"
    assert tokenizer.decode(ids, hide=False) == "<|im_start|>hi<think><|im_end|><|endoftext|>"


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("size", [SMALLEST_VOCABULARY, 300, 777])
@pytest.mark.parametrize("max_han_per_token", [1, 2, 4])
def test_the_size_is_exact(corpus: list[str], size: int, max_han_per_token: int) -> None:
    assert train_tokenizer(corpus[:200], size, max_han_per_token=max_han_per_token).size == size


def is_chinese(character: str) -> bool:
    return unicodedata.name(character, "").startswith("CJK UNIFIED IDEOGRAPH")


@pytest.mark.parametrize("max_han_per_token", [1, 2, 4])
def test_chinese_stays_by_itself_and_in_short_runs(corpus: list[str], max_han_per_token: int) -> None:
    trained = train_tokenizer(corpus, 1200, max_han_per_token=max_han_per_token)
    runs = set()
    for index in range(9, trained.size):
        text = trained.token(index)
        num_chinese = sum(map(is_chinese, text))
        assert num_chinese in (0, len(text)), f"{text!r} mixes Chinese with something else"
        runs.add(num_chinese)
    assert max(runs) == max_han_per_token


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2026")) == 4


def test_training_twice_gives_the_same(corpus: list[str], tokenizer: Tokenizer) -> None:
    again = train_tokenizer(corpus, 1200, max_han_per_token=4)
    assert again.fingerprint == tokenizer.fingerprint
    assert train_tokenizer(corpus, 1200, max_han_per_token=2).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("texts", [[], [""], [" \n", "\t"]])
def test_no_text_is_a_clear_error(texts: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(texts, 1000)


def test_impossible_sizes_are_clear_errors() -> None:
    with raises_user_error(where="tokenizer.vocab_size", got=264):
        train_tokenizer(["text"], SMALLEST_VOCABULARY - 1)
    with raises_user_error(where="tokenizer.max_han_per_token", got=0):
        train_tokenizer(["text"], 1000, max_han_per_token=0)


# --------------------------------------------------------------------------------------------------------------- files


def test_transformers_reads_the_folder_alike(tokenizer: Tokenizer, corpus: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.size
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.message_end, tokenizer.end_of_text)
    draw = random.Random(0)
    odd = ["  two", "café e\u0301", "👩‍👩‍👧", "a\r\n\tb", "３.14", "x == 'it''s'", "。！？", "\u3000全角", "", "\n\n\n"]
    for _ in range(200):
        parts = [draw.choice(corpus)[draw.randrange(60) :][:30] for _ in range(2)] + draw.choices(odd, k=3)
        draw.shuffle(parts)
        text = draw.choice(["", " ", "\n"]).join(parts)
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids, text
        assert theirs.decode(ids) == tokenizer.decode(ids, hide=False), text


def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "deep" / "folder")
    loaded = Tokenizer.load(tmp_path / "deep" / "folder")
    assert (loaded.fingerprint, loaded.size) == (tokenizer.fingerprint, tokenizer.size)
    assert loaded.added_ids == tokenizer.added_ids
    assert loaded.encode("从前 <|im_end|> cat") == tokenizer.encode("从前 <|im_end|> cat")


def test_a_folder_with_the_template_in_its_settings_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.template, kept = "{{ 'mine' }}", tokenizer.template
    try:
        tokenizer.save(tmp_path)
    finally:
        tokenizer.template = kept
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.load(tmp_path).template == "{{ 'mine' }}"


def test_no_folder_is_a_clear_error(tmp_path: Path) -> None:
    with raises_user_error(where=tmp_path, wanted="a folder with tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_chatml_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|im_end|>", "<|eot_id|>"), encoding="utf-8")
    with raises_user_error(where=tmp_path, wanted="what tokenizer_config.json names"):
        Tokenizer.load(tmp_path)


def test_damage_is_a_clear_error_or_does_no_harm(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = path.read_bytes()
    draw = random.Random(0)
    refused = 0
    for trial in range(40):
        if trial % 2:
            damaged = whole[: draw.randrange(len(whole))]
        else:
            place = draw.randrange(len(whole))
            damaged = whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :]
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            refused += 1
            Tokenizer.load(tmp_path).encode("text 文字")
            refused -= 1
    assert refused >= 20  # every file that was cut short, and most of the others


@pytest.mark.parametrize("content", ["{}", "[]", "null", '"text"', json.dumps({"model": {"type": "BPE"}})])
def test_other_json_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with raises_user_error(where="tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_text_without_spaces_is_trained_in_linear_time_and_ordinary_text_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    dna = "".join(draw.choices("ACGT", k=300_000))
    start = time.process_time()
    tokenizer = train_tokenizer([dna], 600)
    assert time.process_time() - start < 60  # quadratic without a limit on the length of a piece
    assert tokenizer.decode(tokenizer.encode(dna)) == dna and len(tokenizer.encode(dna)) < len(dna) / 3
    ordinary = ["".join(draw.choices("abc de\n中文字，", k=2000)) + "=" * 1000 for _ in range(20)]
    limited = train_tokenizer(ordinary, 700, max_han_per_token=4).definition
    monkeypatch.setattr(train, "MAX_PIECE_CHARACTERS", 1 << 30)
    assert train_tokenizer(ordinary, 700, max_han_per_token=4).definition == limited


def test_a_large_corpus_is_sampled_evenly_and_a_small_one_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {number:05} of many" for number in range(2000)]
    assert sample_texts(texts) == training_sample.Sample(texts)
    monkeypatch.setattr(training_sample, "MAX_BYTES", 4000)
    sample = sample_texts(texts)
    assert sample.note and 2000 < sum(map(len, sample.texts)) <= 4000
    numbers = [int(text.split()[1]) for text in sample.texts]
    gaps = [after - before for before, after in zip([0, *numbers], [*numbers, 2000], strict=True)]
    assert max(gaps) < 3 * 2000 / len(numbers)
    assert sample_texts(iter(texts)) == sample


def test_distinct_words_are_limited_but_not_repeated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_sample, "MAX_WORD_CHARACTERS", 1000)
    repeated = [f"the same {number % 7} words, again" for number in range(1000)]
    assert len(sample_texts(repeated).texts) == 1000
    distinct = [f"{number:030x}" for number in range(1000)]
    assert 15 < len(sample_texts(distinct).texts) <= 1000 // 30
    assert len(sample_texts(["从" * 2_000_000]).texts) == 1, "one text of any length is taken in parts"


def test_runs_without_a_space_are_limited_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_sample, "MAX_RUN_CHARACTERS", 10_000)
    dna = "".join(random.Random(0).choices("ACGT", k=100_000))
    notes: list[str] = []
    read: list[int] = []
    trained = train_tokenizer(
        [dna, "words stay " * 50], 300, note=notes.append, sampled=lambda: read.append(len(notes))
    )
    assert len(trained.encode(dna)) < len(dna) / 2 and len(trained.encode(" words stay")) < 6
    assert read == [0] and notes == ["90k characters in runs without a space are left out"]


def external(folder: Path, eos: object, names: dict[str, str], ends: Any = None) -> Path:
    """A byte-level tokenizer of another project, with a config whose `eos_token_id` is `eos`."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(['said "Hello" to <them> [all] | 你好 ' * 20], trainer)
    bpe.add_special_tokens(ends or ["</s>"])
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.integers(0, 300) | st.lists(st.integers(0, 300), max_size=4))
def test_the_end_of_another_config_takes_no_ordinary_token(tmp_path: Path, ids: int | list[int]) -> None:
    tokenizer = Tokenizer.load(external(tmp_path, ids, {"eos_token": "</s>"}))
    for index in range(tokenizer.size):
        text = tokenizer.decode([index], hide=False)
        if index not in tokenizer.added_ids and "\ufffd" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.stop == {tokenizer.control("</s>")}
    assert tokenizer.decode(tokenizer.encode('said "Hello"')) == 'said "Hello"'


@pytest.mark.parametrize("token", ['"', "<", "|", "Hello"])
def test_an_ordinary_token_as_end_is_refused(tmp_path: Path, token: str) -> None:
    with raises_user_error(what="ordinary token", got=token):
        Tokenizer.load(external(tmp_path, 2, {"eos_token": token}))


def test_an_added_token_that_takes_a_character_away_is_refused(tmp_path: Path) -> None:
    with raises_user_error(what="vanish", got='"'):
        Tokenizer.load(external(tmp_path, 2, {"eos_token": "</s>"}, ["</s>", '"']))
