"""One tokenizer for all tests of text: 1,200 ids, trained on stories in two languages, code and tool calls."""

from __future__ import annotations

import pytest

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.data.tokenizer.train import train_tokenizer

CODE = 'def add(a, b):\n    return a + b\n\n# {"name": "get_weather", "arguments": {"city": "北京", "days": 3}}\n'


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    from penjing.data.synthetic.dataset_rows import pretrain_documents

    return [*pretrain_documents(5, 600), CODE * 20]


@pytest.fixture(scope="session")
def tokenizer(corpus: list[str]) -> Tokenizer:
    return train_tokenizer(corpus, 1200, max_han_per_token=4)
