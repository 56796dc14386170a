"""Large tensors in pieces that a core's cache holds, for several small operations in a row on CPUs.

Each operation of an eager program reads and writes all of its operands. Over 8 MB that is main memory each time; piece
by piece only the first reads and the last writes are.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

PIECE = 1 << 18  # values: 1 MiB in float32


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Contiguous tensors of one shape, flattened and cut alike."""
    flat = [tensor.view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), PIECE):
        yield tuple(tensor[start : start + PIECE] for tensor in flat)


def row_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of as many rows, cut into runs of whole rows; the first says how many values one has."""
    rows = max(1, PIECE // max(1, tensors[0][:1].numel()))
    for start in range(0, len(tensors[0]), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)
