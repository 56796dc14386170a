"""Splits large tensors into chunks that fit a core's cache, for several small operations in a row on CPUs.

Each eager operation reads and writes all of its operands, over 8 MB from and to main memory. Chunk by chunk, only the
first read and the last write of each chunk go to main memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

CHUNK = 1 << 18  # values: 1 MiB in float32


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of contiguous tensors of one shape, flattened."""
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), CHUNK):
        yield tuple(tensor[start : start + CHUNK] for tensor in flat)


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of full rows of tensors with equally many rows; their size is that of the first tensor's rows."""
    rows = max(1, CHUNK // max(1, tensors[0][:1].numel()))
    for start in range(0, len(tensors[0]), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)
