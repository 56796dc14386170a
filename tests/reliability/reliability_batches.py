"""Batches by number, for tests of the loop."""

import torch

from penjing.loader.batch import Batch
from penjing.loader.batch_source import Source

ROWS, TOKENS = 2, 8


def make_batch(number, rows=ROWS, spoiled=False):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 50, (rows, TOKENS), generator=generator)
    return Batch(
        ids_BT=ids,
        document_BT=torch.zeros_like(ids),
        scored_N=None,
        target_N=torch.randint(0, 50, (rows * TOKENS,), generator=generator),
        weight_N=torch.full((rows * TOKENS,), float("nan") if spoiled else 1.0),
        num_tokens=rows * TOKENS,
    )


class Batches(Source):
    """Batch 0, 1, 2, ...; some spoiled, some skipped."""

    def __init__(self, spoiled=(), skip=()):
        self.spoiled, self.skip, self.next = spoiled, skip, 0

    def __next__(self):
        while self.next in self.skip:
            self.next += 1
        self.next += 1
        return make_batch(self.next - 1, spoiled=self.next - 1 in self.spoiled)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]
