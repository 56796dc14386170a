"""Tokens of somebody else's template that stand across the border of what is taught.

A model says whole tokens: one that holds a character of an answer has to be said to answer, and one that holds none
does not. Which tokens those are is worked out here from what each token says, not from offsets.
"""

from __future__ import annotations

import pytest

from penjing.data.chat.external_templates import TemplateSpan
from penjing.data.chat.render import _spans_to_ids
from penjing.data.tokenizer.tokenizer import Tokenizer

TEXTS = ["the little dog", "a red kite, a red kite and the blue one", "北京的小狗在公园里。", "x = add(a, b)\n\n"]


def spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, int, int]]:
    """(id, first, last + 1 character) of each token, from what it decodes to; broken characters belong to all parts."""
    found, place = [], 0
    ids = tokenizer.encode(text)
    for number, index in enumerate(ids):
        before, upto = tokenizer.decode(ids[:number]), tokenizer.decode(ids[: number + 1])
        whole = len(upto.rstrip("\ufffd"))
        end = whole if whole > place or not upto.endswith("\ufffd") else place
        found.append((index, len(before.rstrip("\ufffd")), max(end, len(before.rstrip("\ufffd")) + 1)))
        place = end
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_a_token_is_taught_if_any_of_it_is(tokenizer: Tokenizer, text: str) -> None:
    tokens = spans(tokenizer, text)
    assert any(last - first > 1 for _, first, last in tokens), "no token has a border inside"
    inside = 0
    for begin in range(1, len(text)):
        for end in range(begin + 1, len(text) + 1):
            pieces = [
                TemplateSpan(text[:begin], True, False),
                TemplateSpan(text[begin:end], True, True),
                TemplateSpan(text[end:], True),
            ]
            rendered = _spans_to_ids(tokenizer, [piece for piece in pieces if piece.text])
            assert rendered.ids == [index for index, _, _ in tokens]
            wanted = [int(first < end and last > begin) for _, first, last in tokens]
            assert rendered.weights == wanted, (begin, end)
            inside += any(first < begin < last for _, first, last in tokens)
    assert inside


def test_the_blank_that_joins_an_answer_is_said_with_it(tokenizer: Tokenizer) -> None:
    """As after `[/INST]` in Llama 2's template: the blank is the template's, the word after it the answer's."""
    (index,) = tokenizer.encode(" the")
    rendered = _spans_to_ids(tokenizer, [TemplateSpan("dog ", True, False), TemplateSpan("the", True, True)])
    assert rendered.ids[-1] == index
    assert rendered.weights == [0] * (len(rendered.ids) - 1) + [1]
