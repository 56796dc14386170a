"""Text while it is written: every piece together is what decoding all ids at once gives."""

from __future__ import annotations

import json

import numpy as np
import pytest

from penjing.data.chat.turn_parser import parse
from penjing.data.tokenizer.tokenizer import VISIBLE_TOKENS
from penjing.infer.text_stream import TextStream, TurnStream

SAID = "the cat, 小猫 🎈 naïve龘靐\n\n  café"


@pytest.fixture(params=["byte_level", "metaspace"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def add(stream, index):
    stream.extend([index])
    return stream.take()


def pieces(tokenizer, ids, stop_strings=()):
    stream = TextStream(tokenizer, stop_strings)
    return [*(add(stream, index) for index in ids), stream.finish()], stream


def test_text_comes_in_whole_characters_and_as_soon_as_it_is_sure(tokenizer):
    ids = tokenizer.encode(SAID)
    found, _ = pieces(tokenizer, ids)
    assert "".join(found) == SAID
    assert len([piece for piece in found if piece]) > 10
    assert not found[-1], "it waited for nothing"


def test_any_ids_at_all_are_what_decoding_gives(tokenizer):
    generator = np.random.default_rng(0)
    # Where bytes stand beside words, one broken byte breaks all that it follows, also those that were shown.
    may = [index for index in range(tokenizer.size) if not tokenizer.token(index).startswith("<0x")]
    if not tokenizer.has("<think>"):
        may = [index for index in may if "\ufffd" not in tokenizer.token(index)]
    broken = 0
    for length in [1, 2, 3, 7, 40] * 20:
        ids = generator.choice(may, length).tolist()
        text = tokenizer.decode(ids)
        broken += "\ufffd" in text
        assert "".join(pieces(tokenizer, ids)[0]) == text
    assert broken > 10 or not tokenizer.has("<think>")


def test_invalid_bytes_are_shown_soon_and_are_what_decoding_gives(byte_level):
    """Bytes that begin, continue and break characters, one token each: no more than 8 wait, and nothing is kept."""
    vocabulary = json.loads(byte_level.definition)["model"]["vocab"]
    one_byte = {byte_level.token_bytes(index): index for index in vocabulary.values()}
    generator = np.random.default_rng(2)
    for number in range(600):
        length = int(generator.integers(1, 60))
        if number % 3:
            octets = generator.choice([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x41, 0xED], length).tolist()
        else:
            octets = list(("你好😀é" * 6).encode())
            octets.insert(int(generator.integers(0, 40)), 0xF0)
        ids = [one_byte[bytes([octet])] for octet in octets]
        stream, shown = TextStream(byte_level), ""
        for count, index in enumerate(ids, 1):
            shown += add(stream, index)
            assert byte_level.decode(ids[:count]).startswith(shown)
            assert len(bytes(octets[:count]).decode(errors="replace")) - len(shown) <= 8
            assert len(stream._ids) <= 16
        assert shown + stream.finish() == bytes(octets).decode(errors="replace")
        stream, shown, place = TextStream(byte_level), "", 0
        while place < len(ids):  # several at once
            count = int(generator.integers(1, 20))
            stream.extend(ids[place : place + count])
            shown, place = shown + stream.take(), place + count
        assert shown + stream.finish() == bytes(octets).decode(errors="replace")


def test_ids_without_a_text_are_not_kept(byte_level):
    stream = TextStream(byte_level)
    for index in [*byte_level.encode("the cat"), *[byte_level.control("<|im_start|>")] * 50]:
        add(stream, index)
    assert len(stream._ids) <= 16 and add(stream, byte_level.encode("the")[0])


@pytest.mark.parametrize(
    ("stops", "kept"),
    [
        (["cat"], "the "),
        (["sat", "at, 小"], "the c"),
        ([" 🎈 n"], "the cat, 小猫"),
        (["\n\n"], "the cat, 小猫 🎈 naïve龘靐"),
        (["é"], "the cat, 小猫 🎈 naïve龘靐\n\n  caf"),
        (["catt", "zzz", ""], SAID),
        (["the cat, 小猫 🎈 naïve龘靐\n\n  café!"], SAID),
    ],
)
def test_a_stop_string_ends_the_text_wherever_tokens_part(tokenizer, stops, kept):
    for ids in (tokenizer.encode(SAID), [index for letter in SAID for index in tokenizer.encode(letter)]):
        if tokenizer.decode(ids) != SAID:  # letters alone begin words of their own there
            continue
        found, stream = pieces(tokenizer, ids, stops)
        assert "".join(found) == kept
        assert stream.stopped == (kept != SAID)


def test_of_several_stop_strings_the_earliest_in_the_text_ends_it(byte_level):
    ids = byte_level.encode("the cat sat on the mat")
    for stops in (["mat", "sat"], ["sat", "mat"], [" mat", "zzz", " on"]):
        stream = TextStream(byte_level, stops)
        assert stream.extend(ids)
        assert (
            stream.take() == "the cat sat on the mat"[: min("the cat sat on the mat".find(stop) % 99 for stop in stops)]
        )


def test_watching_tells_the_moment(byte_level):
    stream, ids = TextStream(byte_level, ["cat"]), byte_level.encode("the cat sat")
    told = [stream.extend([index]) for index in ids]
    before = byte_level.decode(ids[: told.index(True)])
    assert "cat" not in before and "cat" in byte_level.decode(ids[: told.index(True) + 1])
    assert stream.take() == "the " and stream.take() == "" and stream.finish() == ""


def test_a_turn_in_pieces_is_the_turn_that_is_parsed(tokenizer):
    """Of random marks, blanks and words."""
    generator = np.random.default_rng(1)
    words = [*VISIBLE_TOKENS, "\n", "\n", " ", " the cat", "小猫", '{"name": "add"}', "🎈", "<", "</tool"]
    thoughts = calls = 0
    for number in range(400):
        chosen = [words[index] for index in generator.integers(0, len(words), generator.integers(1, 12))]
        ids = [index for word in chosen for index in _ids(tokenizer, word)]
        thinking = (None, True, False)[number % 3]
        stream = TurnStream(tokenizer, thinking)
        found = [*(piece for index in ids for piece in add(stream, index)), *stream.finish()]
        said = parse(tokenizer, ids, thinking=thinking)
        assert "".join(piece.text for piece in found if piece.kind == "reasoning") == said.message.reasoning_content
        assert "".join(piece.text for piece in found if piece.kind == "content") == said.content
        by_number = {}
        for piece in found:
            if piece.kind == "tool_call":
                by_number[piece.number] = by_number.get(piece.number, "") + piece.text
        texts = [text.strip() for text in by_number.values()]
        assert [text for text in texts if text] == [call.text for call in said.calls if call.text]
        thoughts, calls = thoughts + bool(said.message.reasoning_content), calls + len(said.calls)
    assert thoughts > 30 and calls > 30


def _ids(tokenizer, word):
    return [tokenizer.control(word)] if tokenizer.has(word) else tokenizer.encode(word)


def test_a_stop_string_ends_a_turn_among_its_words(byte_level):
    ids = [*byte_level.encode("the cat"), byte_level.control("<tool_call>"), *byte_level.encode("the cat sat")]
    stream = TurnStream(byte_level, stop_strings=["t sa"])
    told = [stream.extend([index]) for index in ids]
    assert told.count(True) >= 1 and stream.stopped
    assert [(piece.kind, piece.text) for piece in _joined(stream)] == [("content", "the cat"), ("tool_call", "the ca")]


def _joined(stream):
    joined = {}
    for piece in [*stream.take(), *stream.finish()]:
        before = joined.get(piece.number)
        joined[piece.number] = piece if before is None else piece._replace(text=before.text + piece.text)
    return list(joined.values())


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_tokens_of_reasoning_are_counted(tokenizer, thinking):
    """Between the marks, whether they are tokens or text, and however the ids come."""
    reasoning, rest = (
        tokenizer.encode("cat 小猫"),
        [*tokenizer.encode("so"), *tokenizer.encode("<tool_call>{}</tool_call>")],
    )
    opened = [] if thinking else encode(tokenizer, "<think>")
    ids = [*opened, *reasoning, *encode(tokenizer, "</think>"), *rest]
    for size in (1, 3, 999):
        stream = TurnStream(tokenizer, thinking)
        for start in range(0, len(ids), size):
            stream.extend(ids[start : start + size])
        marks = 0 if tokenizer.has("</think>") else len(encode(tokenizer, "</think>"))
        assert stream.reasoning_tokens == (0 if thinking is False else len(reasoning) + marks)


def encode(tokenizer, mark):
    return [tokenizer.control(mark)] if tokenizer.has(mark) else tokenizer.encode(mark)
