"""Bits per byte against values worked out by hand."""

from __future__ import annotations

import math

import pyarrow
import pytest
import torch
from small_models import small_model
from user_errors import raises_user_error

from penjing.data.tokenizer.train import train_tokenizer
from penjing.eval.task import perplexity
from penjing.eval.text import score_texts, zstd_bits_per_byte

TEXTS = ["The cat sat on the mat. 猫坐在垫子上。", "", "A frog.", "naïve café " * 9]
NUM_BYTES = sum(len(text.encode()) for text in TEXTS)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 290)


@pytest.fixture
def model(tokenizer):
    return small_model(noise=0.1, vocab_size=tokenizer.size, num_hidden_layers=1, max_position_embeddings=32768)


def test_uniform_guesses_cost_log2_of_the_vocabulary(model, tokenizer):
    with torch.no_grad():
        model.norm.weight.zero_()  # every logit is 0
    num_targets = sum(len(tokenizer.encode(text)) + 1 for text in TEXTS)  # each token, and the end of the text
    found, num_bytes, *_ = score_texts(model, tokenizer, TEXTS, seq_len=8)
    assert num_bytes == NUM_BYTES
    assert found == pytest.approx(math.log2(tokenizer.size) * num_targets / NUM_BYTES, rel=1e-5)


def test_a_diverged_model_has_a_perplexity_and_one_with_nan_is_named(model, tokenizer):
    with torch.no_grad():
        model.norm.weight.mul_(1e6)
    score = score_texts(model, tokenizer, TEXTS, seq_len=8)
    assert score.bits > 1000 and {row["perplexity"] for row in score.perplexities()} == {perplexity(400)}
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with raises_user_error(where="the model"):
        score_texts(model, tokenizer, TEXTS, seq_len=8)


@torch.no_grad()
def by_hand(model, tokenizer, seq_len):
    bits = 0.0
    for text in TEXTS:
        ids = [tokenizer.end_of_text, *tokenizer.encode(text), tokenizer.end_of_text]
        for place in range(1, len(ids)):
            begin = (place - 1) // seq_len * seq_len
            logp_V = model(torch.tensor([ids[begin:place]]))[0, -1].log_softmax(-1)
            bits -= float(logp_V[ids[place]]) / math.log(2)
    return bits / NUM_BYTES


@pytest.mark.parametrize("seq_len", [1, 7, 16, 500])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_any_rows_against_one_token_at_a_time(model, tokenizer, seq_len, rows):
    score = score_texts(model, tokenizer, iter(TEXTS), seq_len=seq_len, batch_size=rows)
    assert score.bits == pytest.approx(by_hand(model, tokenizer, seq_len), rel=1e-4)
    rows = score.perplexities()
    assert sum(row["tokens"] for row in rows) == sum(len(tokenizer.encode(text)) + 1 for text in TEXTS)
    nats = sum(row["tokens"] * math.log(row["perplexity"]) for row in rows)
    assert nats / math.log(2) / NUM_BYTES == pytest.approx(score.bits, rel=1e-9)
    assert [row["first"] for row in rows] == [1 << power for power in range(len(rows))]
    assert rows[-1]["last"] == min(seq_len, 2 * rows[-1]["first"] - 1)


def test_no_text_is_no_bits(model, tokenizer):
    assert score_texts(model, tokenizer, [], seq_len=8)[:2] == (0.0, 0)


def test_zstd_counts_a_stream_that_unpacks_to_the_text():
    text = "".join(TEXTS) * 5
    raw = text.encode()
    packed = pyarrow.Codec("zstd", compression_level=19).compress(raw)
    assert pyarrow.decompress(packed, decompressed_size=len(raw), codec="zstd").to_pybytes() == raw
    assert zstd_bits_per_byte(text) == 8 * len(packed) / len(raw)
    assert 0 < zstd_bits_per_byte("ab" * 10_000) < 0.1 < 4 < zstd_bits_per_byte(TEXTS[0])
    assert zstd_bits_per_byte("") >= 0


def test_the_compressor_to_compare_with_tries_hard():
    """Level 19, which finds what level 3 does not."""
    text = "".join(f"{number * 7919 % 1000} words of {number % 37} kinds, " for number in range(4000))
    sizes = {level: 8 * len(pyarrow.Codec("zstd", level).compress(text.encode())) / len(text) for level in (3, 19)}
    assert zstd_bits_per_byte(text) == pytest.approx(sizes[19])
    assert sizes[19] < 0.9 * sizes[3]
