"""What a tokenizer makes of texts: compression by script, ids that are never used, and what its ids cost a model."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from penjing.data.clean.language import script_of
from penjing.data.clean.text_scan import scan
from penjing.data.tokenizer.bulk import BulkEncoder
from penjing.data.tokenizer.tokenizer import Tokenizer

WIDTHS = (128, 256, 384, 512, 768, 1024, 2048, 4096)  # hidden sizes
UNUSED_SHOWN = 12
BATCH = 256  # texts
_SCRIPT_CHARACTERS = 4000  # by which the script of a text is told
# Characters per token that others published, of their texts.
PUBLISHED = (
    ("English", "Llama 2, 32,000 ids", 3.17, "arXiv:2407.21783, section 3.2"),
    ("English", "Llama 3, 128,256 ids", 3.94, "arXiv:2407.21783, section 3.2"),
    ("English", "DeepSeek", 3.3, "api-docs.deepseek.com/quick_start/token_usage: 0.3 tokens a character"),
    ("Chinese", "DeepSeek", 1.7, "api-docs.deepseek.com/quick_start/token_usage: 0.6 tokens a character"),
    ("English", "Cohere multilingual-22-12", 4.8, "its model card, on Wikipedia"),
    ("Chinese", "Cohere multilingual-22-12", 1.1, "its model card, on Wikipedia"),
)


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Any]:
    """What the texts of each script are as tokens, the ids that none has, control tokens apart, and what ids cost."""
    encoder, used_V = BulkEncoder(tokenizer), np.zeros(tokenizer.size, dtype=bool)
    scripts: dict[str, Counter[str]] = {}
    texts = list(texts)
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            used_V[ids] = True
            name = script_of(scan(text[:_SCRIPT_CHARACTERS]))
            words = sum(map(str.isalpha, text)) if name in ("Chinese", "Japanese") else len(text.split())
            counts = scripts.setdefault(name, Counter())
            counts.update(texts=1, bytes=len(text.encode()), characters=len(text), words=words, tokens=len(ids))
    known = set(tokenizer.vocabulary.values()) - tokenizer.added_ids if texts else set()
    unused = [int(index) for index in np.flatnonzero(~used_V) if index in known]
    names = ("language", "tokenizer", "characters_per_token", "source")
    return {
        "ids": tokenizer.size,
        "control_tokens": len(tokenizer.added_ids),
        "compression": {name: {**counts, **_ratios(counts)} for name, counts in scripts.items()},
        "published": [dict(zip(names, row, strict=True)) for row in PUBLISHED] if texts else [],
        "unused_ids": len(unused),
        "unused": [tokenizer.token(index) for index in unused[:UNUSED_SHOWN]],
        "parameters": {
            width: {"tied": width * tokenizer.size, "untied": 2 * width * tokenizer.size} for width in WIDTHS
        },
    }


def _ratios(counts: Counter[str]) -> dict[str, float]:
    """Words are between spaces; of Chinese and Japanese each character is one."""
    tokens = max(1, counts["tokens"])
    return {
        "bytes_per_token": counts["bytes"] / tokens,
        "characters_per_token": counts["characters"] / tokens,
        "tokens_per_word": counts["tokens"] / max(1, counts["words"]),
    }
