"""The text of a pretraining comparison: documents that nobody learns from, and the rows of the setting `step`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penjing.bench.trial_spec import PretrainSpec

IGNORED = -100  # a target that does not count, as in torch's cross-entropy
Ids = npt.NDArray[np.int64]


def bits_per_byte(path: str, nats: Callable[[Any, Any], float], rows: int = 16) -> float:
    """Of the held-out documents in `path`, one to a row.

    ids_BT begins with the token that opens a text, target_BT has IGNORED where no target is. nats(ids_BT, target_BT)
    is the sum over the targets that count. Batches are cut to their longest row.
    """
    total = 0.0
    with np.load(path) as file:
        ids_NT, target_NT, num_bytes = file["ids_BT"], file["target_BT"], int(file["num_bytes"])
    for first in range(0, len(ids_NT), rows):
        target_BT = target_NT[first : first + rows]
        longest = int((target_BT != IGNORED).sum(axis=1).max())
        total += nats(ids_NT[first : first + rows, :longest], target_BT[:, :longest])
    return total / math.log(2) / num_bytes


def packed_rows(spec: PretrainSpec) -> Iterator[tuple[Ids, Ids]]:
    """ids_BT, one token longer than a row, and document_BT: batch after batch, without end."""
    with np.load(spec.rows) as file:
        ids_NT, document_NT = file["ids_NT"], file["document_NT"]
    first = 0
    while True:
        index = np.arange(first, first + spec.batch) % len(ids_NT)
        yield ids_NT[index], document_NT[index]
        first += spec.batch


def read_texts(spec: PretrainSpec) -> list[str]:
    with open(spec.text, encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]
