"""What a tokenizer makes of texts: compression by script, ids that are never used, and what its ids cost a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penjing.data.tokenizer.bulk import BulkEncoder
from penjing.data.tokenizer.tokenizer import Tokenizer

WIDTHS = (128, 256, 384, 512, 768, 1024, 2048, 4096)  # hidden sizes
UNUSED_SHOWN = 12
BATCH = 256  # texts
# Characters per token that others published, of their texts.
PUBLISHED = (
    ("English", "Llama 2, 32,000 ids", 3.17, "arXiv:2407.21783, section 3.2"),
    ("English", "Llama 3, 128,256 ids", 3.94, "arXiv:2407.21783, section 3.2"),
    ("English", "DeepSeek", 3.3, "api-docs.deepseek.com/quick_start/token_usage: 0.3 tokens a character"),
    ("Chinese", "DeepSeek", 1.7, "api-docs.deepseek.com/quick_start/token_usage: 0.6 tokens a character"),
    ("English", "Cohere multilingual-22-12", 4.8, "its model card, on Wikipedia"),
    ("Chinese", "Cohere multilingual-22-12", 1.1, "its model card, on Wikipedia"),
)
_HAN, _KANA, _LATIN = (
    re.compile(f"[{s}]") for s in ("\u3400-\u9fff\uf900-\ufaff", "\u3040-\u30ff", "A-Za-z\u00c0-\u024f")
)


@dataclass(slots=True)
class Compression:
    """The texts of one script."""

    texts: int = 0
    bytes: int = 0
    characters: int = 0
    words: int = 0  # between spaces; of Chinese and Japanese: characters
    tokens: int = 0

    def ratios(self) -> dict[str, float]:
        tokens = max(1, self.tokens)
        return {
            "bytes_per_token": self.bytes / tokens,
            "characters_per_token": self.characters / tokens,
            "tokens_per_word": self.tokens / max(1, self.words),
        }


@dataclass(slots=True)
class Report:
    """size: number of ids. unused: ids that no text used, control tokens apart."""

    size: int
    control: int
    scripts: dict[str, Compression] = field(default_factory=dict)
    unused: list[int] = field(default_factory=list)

    def to_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        names = ("language", "tokenizer", "characters_per_token", "source")
        return {
            "ids": self.size,
            "control_tokens": self.control,
            "compression": {name: asdict(part) | part.ratios() for name, part in self.scripts.items()},
            "published": [dict(zip(names, row, strict=True)) for row in PUBLISHED] if self.scripts else [],
            "unused_ids": len(self.unused),
            "unused": [tokenizer.token(index) for index in self.unused[:UNUSED_SHOWN]],
            "parameters": {width: {"tied": width * self.size, "untied": 2 * width * self.size} for width in WIDTHS},
        }


def script_of(text: str) -> str:
    """Chinese if at least a third of the letters are Han, Japanese with some kana, Latin script, or other."""
    head = text[:4000]
    han, kana, latin = (len(pattern.findall(head)) for pattern in (_HAN, _KANA, _LATIN))
    letters = max(1, sum(map(str.isalpha, head)))
    if han + kana > letters / 3:
        return "Japanese" if kana > han / 5 else "Chinese"
    return "Latin script" if latin > letters / 2 else "other"


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> Report:
    """The report on these texts; without texts only the counts."""
    report = Report(tokenizer.size, len(tokenizer.added_ids))
    encoder, used_V = BulkEncoder(tokenizer), np.zeros(tokenizer.size, dtype=bool)
    texts = list(texts)
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            used_V[ids] = True
            name = script_of(text)
            part = report.scripts.setdefault(name, Compression())
            part.texts += 1
            part.bytes += len(text.encode())
            part.characters += len(text)
            part.words += sum(map(str.isalpha, text)) if name in ("Chinese", "Japanese") else len(text.split())
            part.tokens += len(ids)
    if texts:
        known = set(tokenizer.vocabulary.values()) - tokenizer.added_ids
        report.unused = [int(index) for index in np.flatnonzero(~used_V) if index in known]
    return report
