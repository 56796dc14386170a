"""A turn taken apart while it is being written is what `turn_parser.parts` makes of the whole."""

import random

import pytest

from penjing.data.chat.turn_parser import parts
from penjing.data.tokenizer.tokenizer import VISIBLE_TOKENS
from penjing.data.tokenizer.train import train_tokenizer
from penjing.infer.text_stream import TurnStream

PIECES = ["\n", "a", "b c\n", " ", "<", "<think", "字🙂", '\n{"name": "f", "arguments": {"x": 1}}\n', "</tool_call"]


@pytest.fixture(scope="module")
def ours():
    return train_tokenizer(["so it is, and so it was 字"] * 9, 300)


class Spelled:
    """The same vocabulary without control tokens for thoughts and calls."""

    def __init__(self, tokenizer):
        self.inner, self.stop = tokenizer, tokenizer.stop

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def has(self, token):
        return False


@pytest.mark.parametrize("marks", ["ids", "spelled"])
def test_pieces_make_the_same_spans(ours, marks):
    tokenizer = ours if marks == "ids" else Spelled(ours)
    rng = random.Random(1)
    for _ in range(300):
        words = [rng.choice([*PIECES, *VISIBLE_TOKENS]) for _ in range(rng.randint(0, 9))]
        ids = []
        for word in words:
            ids += [ours.control(word)] if marks == "ids" and word in VISIBLE_TOKENS else ours.encode(word)
        thinking = rng.choice([None, True, False])
        stream, told = TurnStream(tokenizer, thinking), {}
        for piece in [piece for index in ids for piece in stream.add(index)] + stream.finish():
            kind, text = told.get(piece.number, (piece.kind, ""))
            assert kind == piece.kind
            told[piece.number] = (kind, text + piece.text)
        wanted = parts(tokenizer, ids, thinking=thinking)
        assert stream.spans == wanted, words
        assert list(told.values()) == [(span.kind, span.text) for span in wanted if span.text or span.closed], words
