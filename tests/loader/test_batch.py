"""Stacking rows into a batch."""

from __future__ import annotations

import numpy as np
import torch

from penjing.data.packing.concat import Row
from penjing.loader.batch import collate


def row(weights, first=0):
    size = len(weights)
    ids = np.arange(first, first + size)
    document = np.where(np.arange(size) < 3, 0, -1)
    return Row(ids, ids + 100, document, np.array(weights, dtype=np.float32))


def test_only_positions_that_count_reach_the_head():
    batch = collate([row([0, 1, 0, 0]), row([1, 0.5, 0, 0], first=10)])
    assert batch.ids_BT.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch.scored_N.tolist() == [1, 4, 5]
    assert batch.target_N.tolist() == [101, 110, 111]
    assert batch.weight_N.tolist() == [1, 1, 0.5]
    assert batch.num_tokens == 6, "padding (document -1) is not counted"
    assert batch.ids_BT.dtype == batch.target_N.dtype == batch.scored_N.dtype == torch.int64
    assert batch.weight_N.dtype == torch.float32


def test_where_all_count_nothing_is_selected():
    batch = collate([row([1, 1, 1]), row([1, 2, 1])])
    assert batch.scored_N is None
    assert batch.target_N.tolist() == [100, 101, 102] * 2
    assert batch.weight_N.tolist() == [1, 1, 1, 1, 2, 1]


def test_where_none_counts_the_selection_is_empty():
    batch = collate([row([0, 0, 0])])
    assert batch.scored_N.tolist() == batch.target_N.tolist() == batch.weight_N.tolist() == []


def test_moving_keeps_every_field():
    batch = collate([row([0, 1, 0, 0])])
    stayed = vars(batch.to(torch.device("cpu")))
    assert all(stayed[name] is value for name, value in vars(batch).items())  # nothing is copied
    moved = batch.to(torch.device("meta"))
    assert moved.ids_BT.device.type == moved.scored_N.device.type == moved.weight_N.device.type == "meta"
    assert moved.num_tokens == 3
    assert collate([row([1, 1])]).to(torch.device("meta")).scored_N is None
