"""Batches in a global order that does not know how many ranks read it, and the thread that makes them ready."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from penjing.data.packing.concat import Row
from penjing.loader.batch_source import DeviceSource, PackedSource, Source
from penjing.loader.prefetch import Prefetch


class NumberedRows:
    """Row i says i."""

    seq_len = 3
    rows_per_epoch = 1000
    padding_per_epoch = 0

    def __init__(self, breaks_at=None):
        self.breaks_at = breaks_at

    def documents(self, index):
        return [index]

    def row(self, index):
        if index == self.breaks_at:
            raise OSError("the disk went away")
        ids = np.full(3, index)
        return Row(ids, ids, np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.float32))


def numbers(batch):
    return batch.ids_BT[:, 0].tolist()


def global_rows(world, micro_size, num_batches, state=None):
    """The rows of some global batches, in order, and the state after them; every rank must have the same state."""
    ranks = [PackedSource(NumberedRows(), micro_size=micro_size, rank=rank, world=world) for rank in range(world)]
    for source in ranks:
        if state is not None:
            source.restore(state)
    read = [number for _ in range(num_batches) for source in ranks for number in numbers(next(source))]
    states = [source.state() for source in ranks]
    assert all(one == states[0] for one in states)
    return read, states[0]


@pytest.mark.parametrize(("world", "micro_size"), [(1, 12), (1, 3), (2, 6), (3, 2), (4, 3), (12, 1)])
def test_any_world_reads_the_same_rows_in_order(world, micro_size):
    read, state = global_rows(world, micro_size, 36 // (world * micro_size))
    assert read == list(range(36))
    assert state == global_rows(1, 12, 3)[1]


@given(some.lists(some.sampled_from([(1, 12), (1, 4), (2, 6), (2, 3), (3, 4), (4, 1), (6, 2)]), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_a_run_may_stop_with_some_ranks_and_go_on_with_others(worlds):
    read, state = [], None
    for world, micro_size in worlds:
        part, state = global_rows(world, micro_size, 12 // (world * micro_size), state)
        read += part
    assert read == list(range(12 * len(worlds)))


@pytest.fixture
def device():
    return torch.device("cpu")


def plain_source(**options):
    return PackedSource(NumberedRows(**options), micro_size=2)


def num_threads():
    return sum(thread.name.startswith("Thread-") for thread in threading.enumerate())


def test_prefetch_gives_what_the_plain_source_gives(device):
    plain, ahead = plain_source(), Prefetch(plain_source(), device)
    for _ in range(20):
        assert numbers(next(ahead)) == numbers(next(plain))
        assert ahead.state() == plain.state()
    ahead.close()


@pytest.mark.parametrize("num_taken", [0, 1, 2, 7])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_state_is_the_place_after_the_last_batch_handed_out(device, num_taken, depth):
    ahead = Prefetch(plain_source(), device, depth)
    for _ in range(num_taken):
        next(ahead)
    state = ahead.state()
    ahead.close()
    other = Prefetch(plain_source(), device, depth)
    next(other)
    other.restore(state)
    assert numbers(next(other)) == [2 * num_taken, 2 * num_taken + 1]
    other.close()


def test_close_stops_the_thread_and_loses_no_batch(device):
    before = num_threads()
    source = plain_source()
    ahead = Prefetch(source, device, depth=3)
    assert numbers(next(ahead)) == [0, 1]
    assert num_threads() == before + 1
    ahead.close()
    ahead.close()
    assert num_threads() == before
    assert source.state() == {"next_row": 2}
    assert numbers(next(ahead)) == [2, 3]
    ahead.close()


def test_a_full_queue_is_waited_for_without_a_clock(device, monkeypatch):
    """The thread looked ten times a second whether it was to stop, and every closing waited for that."""
    put, patience = queue.Queue.put, []

    def watched(self, item, block=True, timeout=None):
        patience.append(timeout)
        put(self, item, block, timeout)

    monkeypatch.setattr(queue.Queue, "put", watched)
    ahead = Prefetch(plain_source(), device, depth=1)
    next(ahead)
    ahead.close()
    assert patience and set(patience) == {None}


def test_an_error_surfaces_in_its_turn_and_again_instead_of_hanging(device):
    before = num_threads()
    ahead = Prefetch(plain_source(breaks_at=4), device)
    assert numbers(next(ahead)) == [0, 1]
    assert numbers(next(ahead)) == [2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk went away"):
            next(ahead)
        assert num_threads() == before
    assert ahead.state() == {"next_row": 4}


def test_a_passing_error_costs_no_batch(device):
    rows = NumberedRows(breaks_at=2)
    ahead = Prefetch(PackedSource(rows, micro_size=2), device)
    next(ahead)
    with pytest.raises(OSError, match="the disk went away"):
        next(ahead)
    rows.breaks_at = None
    assert numbers(next(ahead)) == [2, 3]
    ahead.close()


class Counting(Source):
    """What a source has to bring along itself, and no more."""

    def __init__(self):
        self.next = 0

    def __next__(self):
        self.next += 1
        return torch.tensor(self.next)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


def test_what_callers_need_of_any_source_is_there(device):
    for source in (Counting(), DeviceSource(Counting(), device)):
        before = source.position()
        assert next(source) == 1
        assert source.samples(before, source.position()) == {"places": {"next": [0, 1]}}
        assert (source.split, source.micro_size, source.shrink(before)) == (1, None, False)
        with pytest.raises(TypeError):
            source.fresh()
        source.close()
        source.restore(before)
        assert next(source) == 1
