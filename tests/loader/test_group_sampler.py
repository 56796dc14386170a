"""Groups in a global order: every rank takes its own, and each epoch has all of them once."""

from __future__ import annotations

import pytest

from penjing.loader.group_sampler import EpochOrder, group_source
from penjing.loader.shared_prompt_batch import Answer, Group


def taken(world, micro, batches, start=0, seed=5):
    """The numbers of the groups that all ranks take, in the order of the stream."""
    sources = [
        group_source(
            lambda index: Group(prompt=[index + 1], answers=[Answer(ids=[1])]), EpochOrder(6, seed), micro, rank, world
        )
        for rank in range(world)
    ]
    found = []
    for source in sources:
        source.restore({"next_group": start})
    for _ in range(batches):
        for source in sources:
            batch = next(source)
            last_A = [(batch.document_BT == group).nonzero()[-1].tolist() for group in batch.group_A.tolist()]
            found += [int(batch.ids_BT[row, place]) - 1 for row, place in last_A]
    assert {source.state()["next_group"] for source in sources} == {start + batches * world * micro}
    return found


@pytest.mark.parametrize(("world", "micro"), [(2, 3), (3, 1), (6, 1), (1, 2)])
def test_any_number_of_ranks_takes_the_same_groups_in_order(world, micro):
    alone = taken(1, 1, 18)
    assert taken(world, micro, 18 // (world * micro)) == alone
    assert [sorted(alone[first : first + 6]) for first in (0, 6, 12)] == [list(range(6))] * 3
    assert alone[:6] != alone[6:12]
    assert taken(world, micro, 6 // (world * micro), start=6) == alone[6:12]
