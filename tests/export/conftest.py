"""Tokenizers as other people make them, for the exports."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from penjing.data.tokenizer.tokenizer import HIDDEN_TOKENS, QWEN2_SPLIT, Tokenizer
from penjing.data.tokenizer.train import train_tokenizer

CORPUS = ["Mia saw 3 kites; it's red. 小明看见了12345只风筝。 def f(x): return x**2\n\n\tend 👍🏽 naïve"] * 20

TEXT = "Mia saw a kite by the pond. 小明看见一只风筝。 Then she gave it to the frog, and the frog was glad. "


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([TEXT] * 40, 320)


def _split(*patterns):
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


@pytest.fixture(scope="session")
def external_tokenizer():
    """Make a byte-level BPE tokenizer with the split that a family of models has."""
    llama3 = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = {
        "qwen2": [*_split(QWEN2_SPLIT), plain],
        "llama-bpe": [*_split(llama3), plain],
        "smaug-bpe": [*_split(llama3), plain],
        "gpt-2": [gpt2],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), gpt2],
        "unknown": [*_split(r"\p{L}+"), plain],
        "prefixed": [pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)],
        "metaspace": [pre_tokenizers.Metaspace()],
    }

    def make(name, normaliser=None):
        full = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
        full.pre_tokenizer = pre_tokenizers.Sequence(steps[name])
        full.normalizer = normaliser
        full.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        full.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=398, initial_alphabet=alphabet, show_progress=False)
        )
        full.add_special_tokens([AddedToken(token, special=True) for token in HIDDEN_TOKENS])
        return Tokenizer(full)

    return make
