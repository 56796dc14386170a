"""The allocator's arithmetic against sequences worked out by hand from CUDACachingAllocator.cpp."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limited_allocator import LimitedAllocator, OutOfMemory

from penjing.plan.memory.allocator import CachingAllocator, MemoryBlock, round_request, segment_bytes

KIB, MIB = 1 << 10, 1 << 20


def take(allocator: CachingAllocator, num_bytes: int) -> MemoryBlock:
    block = allocator.malloc(num_bytes)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("asked", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB - 1, MIB), (3 * MIB + 1, 3 * MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(asked: int, rounded: int) -> None:
    assert round_request(asked) == rounded


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (31 * MIB, 32 * MIB),
    ],
)
def test_segments_come_in_three_kinds(rounded: int, segment: int) -> None:
    assert segment_bytes(rounded) == segment


def test_nothing_is_reserved_for_nothing() -> None:
    allocator = CachingAllocator()
    assert allocator.malloc(0) is None
    allocator.free(None)
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        take(allocator, MIB)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    take(allocator, 1)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB + 512, 4 * MIB)


def test_large_requests_do_not_go_into_small_segments() -> None:
    allocator = CachingAllocator()
    take(allocator, 512 * KIB)
    take(allocator, MIB + 1)
    assert allocator.reserved == 22 * MIB
    take(allocator, 512 * KIB)  # the small segment has free bytes
    take(allocator, 9 * MIB)  # and so has the large one
    assert allocator.reserved == 22 * MIB


def test_a_large_rest_of_up_to_a_mebibyte_is_not_split_off() -> None:
    allocator = CachingAllocator()
    take(allocator, 11 * MIB + 512 * KIB)  # of 12: the rest stays with the block, and counts as allocated
    assert (allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB)
    other = CachingAllocator()
    take(other, 10 * MIB + 512)  # of 12: the rest is nearly 2 MiB
    assert (other.allocated, other.reserved) == (10 * MIB + 512, 12 * MIB)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [take(allocator, size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert take(allocator, 18 * MIB).address == blocks[1].address
    assert take(allocator, 25 * MIB).address == blocks[2].address
    assert allocator.reserved == 90 * MIB


def test_neighbours_of_a_segment_join_and_segments_do_not() -> None:
    allocator = CachingAllocator()
    parts = [take(allocator, 6 * MIB) for _ in range(3)]  # 18 of the 20 MiB of one segment
    assert allocator.reserved == 20 * MIB
    for block in (parts[0], parts[2], parts[1]):
        allocator.free(block)
    take(allocator, 20 * MIB)
    assert allocator.reserved == 20 * MIB
    apart = CachingAllocator()
    for block in [take(apart, 20 * MIB) for _ in range(2)]:
        apart.free(block)
    take(apart, 40 * MIB)
    assert apart.reserved == 80 * MIB


def test_cached_segments_are_given_back_before_memory_is_out() -> None:
    allocator = LimitedAllocator(40 * MIB)
    allocator.free(take(allocator, 20 * MIB))
    take(allocator, 30 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (30 * MIB, 30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(12 * MIB)


def test_a_segment_that_is_used_in_part_is_not_given_back() -> None:
    allocator = LimitedAllocator(30 * MIB)
    used, loose = take(allocator, 8 * MIB), take(allocator, 8 * MIB)  # one segment of 20
    allocator.free(loose)
    with pytest.raises(OutOfMemory):
        allocator.malloc(14 * MIB)
    allocator.free(used)
    take(allocator, 30 * MIB)


@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_blocks_never_overlap_and_sums_hold(requests: list[tuple[int, bool]]) -> None:
    allocator = CachingAllocator()
    held: list[MemoryBlock] = []
    for size, frees in requests:
        held.append(take(allocator, size))
        assert held[-1].size >= round_request(size)
        if frees:
            allocator.free(held.pop(len(held) // 2))
        places = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
    for block in held:
        allocator.free(block)
    assert allocator.allocated == 0
