"""Bits per byte of a text: comparable between tokenizers, models and compressors."""

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
    model: Transformer, tokenizer: Tokenizer, texts: Iterable[str], *, seq_len: int, batch_size: int = 16
) -> tuple[float, int]:
    """(bits per UTF-8 byte, bytes) of the texts. Each starts with the end-of-text token and is cut into windows of T. A
    window starts where the last one ended and does not attend to it, so the context is at most T tokens."""
    nats, num_bytes = 0.0, 0
    device = model.embed.weight.device

    def windows() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal num_bytes
        for text in texts:
            num_bytes += len(text.encode())
            ids = [tokenizer.begin, *tokenizer.encode(text), tokenizer.end_of_text]
            for first in range(0, len(ids) - 1, seq_len):
                window = ids[first : first + seq_len + 1]
                yield window[:-1], window[1:]

    stream = windows()
    while batch := list(islice(stream, batch_size)):
        longest = max(len(inputs) for inputs, _ in batch)
        ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
        weight_BT = torch.zeros(len(batch), longest)
        target_BT = torch.zeros_like(ids_BT)
        for row, (inputs, targets) in enumerate(batch):
            ids_BT[row, : len(inputs)] = torch.tensor(inputs)
            target_BT[row, : len(inputs)] = torch.tensor(targets)
            weight_BT[row, : len(inputs)] = 1
        total = model(
            ids_BT.to(device), score=CrossEntropy(target_BT.flatten().to(device), weight_BT.flatten().to(device))
        )
        nats += float(total)
    return nats / math.log(2) / max(1, num_bytes), num_bytes


def zstd_bits_per_byte(text: str) -> float:
    """Bits per byte of the text compressed by `zstd -19`, as a baseline."""
    raw = text.encode()
    compressed = pyarrow.Codec("zstd", compression_level=19).compress(raw)
    return 8 * len(compressed) / max(1, len(raw))
