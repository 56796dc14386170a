"""A small tokenizer of our own form, and one that marks words' beginnings as SentencePiece's do."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from penjing.data.chat import CHAT_TEMPLATE
from penjing.data.tokenizer.tokenizer import CONTROL_TOKENS, HIDDEN_TOKENS, SpecialTokens, Tokenizer
from penjing.data.tokenizer.train import train_tokenizer

TEXTS = [
    "the cat sat on the mat. ",
    "小猫坐在垫子上。",
    "naïve café 🎈🎉 ",
    '{"name": "add", "arguments": {"a": 1}}\n',
] * 20


@pytest.fixture(scope="session")
def byte_level():
    return train_tokenizer(TEXTS, 340, max_han_per_token=4)


@pytest.fixture(scope="session")
def metaspace():
    """Blanks are part of words, bytes stand for what has no token; marks of thoughts and calls are spelled out."""
    full = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    full.pre_tokenizer = pre_tokenizers.Metaspace()
    full.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    full.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=160, special_tokens=["<unk>"], show_progress=False))
    written = json.loads(full.to_str())
    words = written["model"]["vocab"]
    words |= {f"<0x{octet:02X}>": len(words) + octet for octet in range(256)}
    full = tokenizers.Tokenizer.from_str(json.dumps(written))
    full.add_special_tokens(list(HIDDEN_TOKENS))
    roles = SpecialTokens(end_of_text=HIDDEN_TOKENS[0], message_end=HIDDEN_TOKENS[2], begin=HIDDEN_TOKENS[0])
    assert set(CONTROL_TOKENS) > set(HIDDEN_TOKENS)
    return Tokenizer(full, CHAT_TEMPLATE, roles=roles)
