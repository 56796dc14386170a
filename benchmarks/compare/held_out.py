"""The text of a pretraining comparison: documents that nobody learns from, and the rows of the setting `step`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from compare.trial_spec import PretrainSpec

IGNORED = -100  # a target that does not count, as in torch's cross-entropy
Ids = npt.NDArray[np.int64]


def bits_per_byte(path: str, nats: Callable[[Any, Any], float], rows: int = 16) -> float:
    """Bits per byte of the held-out documents in `path`, one per row.

    ids_BT begins with the begin-of-text token; target_BT is IGNORED where there is no target. nats(ids_BT, target_BT)
    returns the sum over the other targets. Batches are cut to their longest row.
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
    """Endless batches of (ids_BT, document_BT); ids_BT is one token longer than a row."""
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
