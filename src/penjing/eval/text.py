"""Bits per byte of any text: comparable between tokenizers, models and compressors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice

import pyarrow
import torch

from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer


@torch.no_grad()
def bits_per_byte(
    model: Transformer, tokenizer: Tokenizer, texts: Iterable[str], *, seq_len: int, rows: int = 16
) -> tuple[float, int]:
    """(bits per UTF-8 byte, bytes) of the texts. Each opens with the end-of-text token and is read in rows of T.

    A row begins where the last one ended and does not see it, so long texts are judged with at most T tokens of past.
    """
    nats, num_bytes = 0.0, 0
    device = model.embed.weight.device

    def windows() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal num_bytes
        for text in texts:
            num_bytes += len(text.encode())
            ids = [tokenizer.begin, *tokenizer.encode(text), tokenizer.end_of_text]
            for first in range(0, len(ids) - 1, seq_len):
                part = ids[first : first + seq_len + 1]
                yield part[:-1], part[1:]

    stream = windows()
    while group := list(islice(stream, rows)):
        longest = max(len(inputs) for inputs, _ in group)
        ids_BT = torch.zeros(len(group), longest, dtype=torch.long)
        weight_BT = torch.zeros(len(group), longest)
        target_BT = torch.zeros_like(ids_BT)
        for row, (inputs, targets) in enumerate(group):
            ids_BT[row, : len(inputs)] = torch.tensor(inputs)
            target_BT[row, : len(inputs)] = torch.tensor(targets)
            weight_BT[row, : len(inputs)] = 1
        total = model(
            ids_BT.to(device), score=CrossEntropy(target_BT.flatten().to(device), weight_BT.flatten().to(device))
        )
        nats += float(total)
    return nats / math.log(2) / max(1, num_bytes), num_bytes


def zstd_bits_per_byte(text: str) -> float:
    """What `zstd -19` makes of the same text, in bits per byte."""
    raw = text.encode()
    packed = pyarrow.Codec("zstd", compression_level=19).compress(raw)
    return 8 * len(packed) / max(1, len(raw))
