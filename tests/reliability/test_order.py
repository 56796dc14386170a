"""The order of samples is a property of the run, not of how many ranks, workers or passes take it."""

import copy
import hashlib
import itertools
import random

import pytest
import torch
from reliability_harness import by_chance

from penjing.data.packing.best_fit import BestFitRows
from penjing.data.packing.concat import ConcatRows, PackedRows
from penjing.data.token_shards import TokenShardWriter
from penjing.loader.batch_source import PackedSource
from penjing.loader.prefetch import Prefetch
from penjing.train.oom_recovery import ResizableBatchSource

GLOBAL = 12  # rows of a step
STEPS = 9  # two epochs and a bit
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The three packers, over documents whose tokens are all different."""
    folder = tmp_path_factory.mktemp("shards")
    rng = random.Random(0)
    made = {}
    for kind in ("documents", "chats"):
        writer = TokenShardWriter(folder / kind, kind=kind, vocab_size=60_000, about={"tokenizer": "none"})
        token = 1
        for _ in range(90):
            ids = list(range(token, token + rng.randint(3, 14)))
            token += len(ids)
            writer.add(ids, len(ids), [0, *[1] * (len(ids) - 1)] if kind == "chats" else None)
        made[kind] = writer.close()
    documents, chats = made["documents"], made["chats"]
    return {
        "stream": ConcatRows(documents, 16, end_of_text=0, seed=5),
        "whole": BestFitRows(documents, 16, end_of_text=0, seed=5),
        "as given": BestFitRows(documents, 16, end_of_text=0, seed=5, order="as_given"),
        "best fit": PackedRows(chats, 16, end_of_text=0, seed=5),
    }


def sources(rows, world, workers, micro):
    """One source for each rank; workers: batches made ready in a thread, 0 for none."""
    # Each rank lays out its own rows, as each process does.
    plain = [PackedSource(copy.copy(rows), micro_size=micro, rank=rank, world=world) for rank in range(world)]
    return [Prefetch(each, CPU, workers) for each in plain] if workers else plain


def steps(made, world, micro, number):
    """The rows of each step in their global order."""
    for _ in range(number):
        taken = []
        for _ in range(GLOBAL // (world * micro)):
            for each in made:
                taken += [tuple(row) for row in next(each).ids_BT.tolist()]
        yield taken


def digest(taken):
    return hashlib.sha256(repr(taken).encode()).hexdigest()


def close(made):
    for each in made:
        if isinstance(each, Prefetch):
            each.close()


COMBINATIONS = [
    (world, workers, micro)
    for world, workers, micro in itertools.product((1, 2, 3, 4, 6, 12), (0, 1, 2), (1, 2, 3))
    if GLOBAL % (world * micro) == 0
]


@pytest.mark.parametrize("packer", ["stream", "whole", "as given", "best fit"])
def test_one_order_for_ranks_workers_and_passes(rows, packer, count):
    found = {}
    for world, workers, micro in COMBINATIONS:
        made = sources(rows[packer], world, workers, micro)
        found[world, workers, micro] = digest(list(steps(made, world, micro, STEPS)))
        close(made)
    assert len(set(found.values())) == 1, found
    assert len(found) >= 24
    count(f"{packer}: combinations of ranks, workers and passes with one order", len(found))


@pytest.mark.parametrize("chains", by_chance(20))
@pytest.mark.parametrize("packer", ["stream", "whole", "as given", "best fit"])
def test_one_order_for_chains_of_resumes(rows, packer, count, chains):
    """Runs that are stopped at random steps and go on with another number of ranks, workers and rows in a pass."""
    made = sources(rows[packer], 1, 0, 1)
    whole = list(steps(made, 1, 1, STEPS))
    rng = random.Random(packer)
    for _ in range(chains):
        state, taken = {"next_row": 0}, []
        while len(taken) < STEPS:
            world, workers, micro = rng.choice(COMBINATIONS)
            made = sources(rows[packer], world, workers, micro)
            for each in made:
                each.restore(state)
            taken += steps(made, world, micro, min(rng.randint(1, 4), STEPS - len(taken)))
            (state,) = {tuple(each.state().items()) for each in made}
            state = dict(state)
            close(made)
        assert taken == whole
    count(f"{packer}: chains of resumes with one order", chains)


def test_every_row_of_conversations_comes_once_in_every_epoch(rows):
    packed = rows["best fit"]
    source = PackedSource(packed, micro_size=1)
    epochs = [sorted(tuple(next(source).ids_BT[0].tolist()) for _ in range(packed.rows_per_epoch)) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) == packed.rows_per_epoch


@pytest.mark.parametrize("packer", ["stream", "whole", "as given"])
def test_every_position_of_texts_comes_once_in_every_epoch(rows, packer):
    """Each epoch cuts elsewhere; less than a row is left out."""
    packed = rows[packer]
    layouts = []
    for epoch in range(4):
        made = [packed.row(epoch * packed.rows_per_epoch + index) for index in range(packed.rows_per_epoch)]
        pairs = [pair for row in made for pair in zip(row.ids_T.tolist(), row.target_T.tolist(), strict=True)]
        assert len(set(pairs)) == len(pairs) == packed.rows_per_epoch * packed.seq_len
        layouts.append(tuple(sorted(tuple(row.ids_T.tolist()) for row in made)))
    assert len(set(layouts)) == 4


@pytest.mark.parametrize("packer", ["stream", "whole", "best fit"])
def test_samples_are_named_by_row_and_document(rows, packer):
    """What is written down of a bad step leads to the documents: they hold the row's tokens."""
    packed = rows[packer]
    source = PackedSource(packed, micro_size=4)
    for _ in range(5):
        before = source.state()
        batch = next(source)
        named = source.samples(before, source.state())
        for row, documents, ids in zip(named["rows"], named["documents"], batch.ids_BT.tolist(), strict=True):
            assert packed.row(row).ids_T.tolist() == ids
            shards = packed.shards
            tokens = {int(t) for d in documents for t in shards.token_N[shards.start_D[d] : shards.end_D[d]]}
            assert set(ids) - {0} <= tokens


@pytest.mark.parametrize("micro", [6, 4, 3, 1])
def test_smaller_passes_keep_the_order(rows, micro):
    """What running out of memory does: back to where the step began, in smaller passes, the same rows."""
    plain = list(steps(sources(rows["whole"], 1, 0, 1), 1, 1, 3))
    for workers in (0, 2):
        feed = ResizableBatchSource(lambda size, workers=workers: sources(rows["whole"], 1, workers, size)[0], 12)
        taken = list(steps([feed], 1, 12, 1))
        at = feed.state()
        next(feed)  # the pass that did not fit
        while feed.micro_size > micro:
            if not feed.shrink(at):
                break
        assert feed.micro_size <= micro
        assert feed.split * feed.micro_size == 12
        taken += steps([feed], 1, feed.micro_size, 2)
        feed.close()
        assert taken == plain
