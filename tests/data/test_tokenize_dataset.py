"""Records to two halves: who is held out, what is cut to fit, and what happens when there is hardly any text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.corpus import Split, place_of, split_key, threshold
from penjing.data.formats import Chat, Document, Message
from penjing.data.token_shards import TokenShards
from penjing.data.tokenize_dataset import TokenizedDataset, prepare_chats, prepare_documents
from penjing.data.tokenizer.tokenizer import Tokenizer


def prepare(tokenizer: Tokenizer, folder: Path, texts: list[str], share: float, **options: Any) -> TokenizedDataset:
    documents = (Document(text=text, source="a.txt", line=number) for number, text in enumerate(texts))
    split = Split(share=share)
    return prepare_documents(split.placed(documents), tokenizer, folder, split=split, about={"source": "s"}, **options)


def is_held_out(text: str, below: float) -> bool:
    return place_of(text) < below


def held_out_below(texts: Iterable[str], share: float) -> float:
    return threshold(map(place_of, texts), share)


def chat(*turns: str, role: str = "user") -> Chat:
    """Turns of user and assistant, by turns."""
    roles = itertools.cycle(["user", "assistant"])
    messages = tuple(Message(role=role, content=content) for role, content in zip(roles, turns, strict=False))
    return Chat(messages=messages, tools=(), source="a.jsonl", line=1)


def prepare_some_chats(
    tokenizer: Tokenizer, folder: Path, chats: list[Chat], share: float = 0.5, seq_len: int = 40
) -> TokenizedDataset:
    split = Split(share=share)
    return prepare_chats(split.placed(chats), tokenizer, folder, seq_len=seq_len, split=split, about={})


def texts_of(tokenizer: Tokenizer, shards: TokenShards) -> list[str]:
    bounds = zip(shards.start_D, shards.end_D, strict=True)
    return [tokenizer.decode(shards.token_N[start:end].tolist()) for start, end in bounds]


# ----------------------------------------------------------------------------------------------------------- the split

MANY = [f"text number {number}" for number in range(2000)]


def test_the_share_held_out_is_near_the_one_asked() -> None:
    for share in (0.01, 0.1, 0.5):
        held_out = sum(is_held_out(text, share) for text in MANY)
        assert abs(held_out - share * len(MANY)) < 4 * (len(MANY) * share * (1 - share)) ** 0.5


def test_a_text_held_out_at_one_share_is_held_out_at_every_larger_one() -> None:
    assert all(is_held_out(text, 0.2) for text in MANY if is_held_out(text, 0.1))


def test_the_split_never_changes() -> None:
    """Pinned: models of an older version must not be judged by texts they have learned."""
    assert [number for number, text in enumerate(MANY[:300]) if is_held_out(text, 0.02)] == [
        9,
        46,
        148,
        187,
        232,
        255,
        290,
    ]


def test_documents_go_where_their_hash_says_in_their_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = MANY[:600] + MANY[100:200]  # copies, and more than one batch
    made = prepare(tokenizer, tmp_path, texts, 0.1)
    assert texts_of(tokenizer, made.train) == [text for text in texts if not is_held_out(text, 0.1)]
    assert texts_of(tokenizer, made.validation) == [text for text in texts if is_held_out(text, 0.1)]
    assert not set(texts_of(tokenizer, made.train)) & set(texts_of(tokenizer, made.validation))
    assert made.train.folder == tmp_path / "train" and made.validation.folder == tmp_path / "validation"
    assert (made.skipped, made.shortened) == (0, 0)


def test_the_shards_say_how_they_were_made(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = prepare(tokenizer, tmp_path, ["一二三", *MANY[:50]], 0.5)
    for half, name in ((made.train, "train"), (made.validation, "validation")):
        assert half.meta["split"] == name
        assert half.meta["tokenizer"] == tokenizer.fingerprint
        assert (half.meta["val_fraction"], half.meta["held_out_below"]) == (0.5, 0.5)
        assert half.meta["source"] == "s"
        assert half.kind == "documents"
    assert made.train.num_bytes + made.validation.num_bytes == 9 + sum(map(len, MANY[:50]))


# ---------------------------------------------------------------------------------------------------- hardly any text


@given(texts=st.lists(st.text(max_size=3), max_size=6), share=st.floats(0.001, 0.999))
def test_both_halves_are_filled_wherever_they_can_be(texts: list[str], share: float) -> None:
    below = held_out_below(texts, share)
    held_out = {text for text in texts if is_held_out(text, below)}
    by_share = {text for text in texts if is_held_out(text, share)}
    if by_share and by_share != set(texts):
        assert below == share
    elif len(set(texts)) > 1:
        assert len(held_out) == 1
        assert not any(is_held_out(text, below) for text in set(texts) - held_out)
    else:
        assert below == share


def test_no_more_is_read_than_is_needed() -> None:
    def endless() -> Any:
        yield from (f"text {number}" for number in itertools.count())

    assert held_out_below(endless(), 0.01) == 0.01


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_of_a_handful_of_texts_one_is_held_out_with_its_copies(
    tokenizer: Tokenizer, tmp_path: Path, share: float
) -> None:
    texts = [*MANY[:5], *MANY[:5]]
    made = prepare(tokenizer, tmp_path, texts, share)
    held_out = texts_of(tokenizer, made.validation)
    assert len(held_out) == 2 and len(set(held_out)) == 1
    assert texts_of(tokenizer, made.train) == [text for text in texts if text != held_out[0]]
    below = made.train.meta["held_out_below"]
    assert below == made.validation.meta["held_out_below"] == held_out_below(texts, share) != share
    assert [is_held_out(text, below) for text in texts] == [text == held_out[0] for text in texts]


def test_the_one_held_out_depends_on_no_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = set()
    for number, texts in enumerate(itertools.permutations(MANY[:4])):
        found.update(texts_of(tokenizer, prepare(tokenizer, tmp_path / str(number), list(texts), 1e-9).validation))
    assert len(found) == 1


def test_of_two_chats_one_is_held_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = prepare_some_chats(tokenizer, tmp_path, [chat("a", "b"), chat("c", "d")], share=1e-9)
    assert (made.train.num_documents, made.validation.num_documents) == (1, 1)


@pytest.mark.parametrize("texts", [[], ["only one"], ["the same", "the same"]])
def test_too_little_to_part_is_a_clear_error(tokenizer: Tokenizer, tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"nothing was left for the (train|validation) split"):
        prepare(tokenizer, tmp_path, texts, 0.5)


# --------------------------------------------------------------------------------------------------------------- chats


def test_chats_are_rendered_with_their_weights(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chats = [chat(f"question {number}", f"answer {number}") for number in range(30)]
    made = prepare_some_chats(tokenizer, tmp_path, chats)
    for half in (made.train, made.validation):
        expected = [one for one in chats if is_held_out(split_key(one), 0.5) == (half is made.validation)]
        rendered = [render(tokenizer, one.messages) for one in expected]
        assert half.token_N.tolist() == [index for one in rendered for index in one.ids]
        assert half.weight_N is not None
        assert half.weight_N.tolist() == [weight for one in rendered for weight in one.weights]
        assert half.bytes_D.tolist() == [len(one.messages[1].content) for one in expected]
        assert half.meta["seq_len"] == 40
    assert (made.skipped, made.shortened) == (0, 0)


def test_long_chats_lose_whole_turns_and_hopeless_ones_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    short = [chat(f"q{number}", "a") for number in range(20)]
    long = chat("first?", "one", "second?", "two", "third?", "three " * 60)
    hopeless = chat("why? " * 60, "because")
    made = prepare_some_chats(tokenizer, tmp_path, [*short, long, hopeless], seq_len=60)
    assert (made.skipped, made.shortened) == (1, 1)
    texts = texts_of(tokenizer, made.train) + texts_of(tokenizer, made.validation)
    assert len(texts) == 21
    (kept,) = [text for text in texts if "first?" in text]
    assert "two" in kept and "third?" not in kept
    longest = max(int((half.end_D - half.start_D).max()) for half in (made.train, made.validation))
    assert longest <= 61  # a row of 60 inputs and their 60 targets


def test_the_longest_chat_that_fits_is_kept_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    exact = chat("one two three", "four five six")
    num_tokens = len(render(tokenizer, exact.messages).ids)
    for seq_len, skipped in ((num_tokens - 1, 0), (num_tokens - 2, 1)):
        chats = [chat("a", "b"), chat("c", "d"), exact]
        made = prepare_some_chats(tokenizer, tmp_path, chats, seq_len=seq_len)
        assert (made.skipped, made.shortened) == (skipped, 0)


def test_a_call_is_not_parted_from_its_result(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A chat never ends with a question to a tool that had been answered."""
    call = {"name": "get_time", "arguments": {}}
    messages = (
        Message(role="user", content="hi"),
        Message(role="assistant", content="hello"),
        Message(role="user", content="what time is it?"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="noon"),
        Message(role="assistant", content="It is " + "very " * 40 + "late."),
    )
    long = Chat(messages=messages, tools=(), source="a", line=1)
    made = prepare_some_chats(tokenizer, tmp_path, [long, chat("a", "b"), chat("c", "d")], seq_len=60)
    texts = texts_of(tokenizer, made.train) + texts_of(tokenizer, made.validation)
    (kept,) = [text for text in texts if "hello" in text]
    assert "what time" not in kept
    assert made.shortened == 1
