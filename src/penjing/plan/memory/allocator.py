"""A model of PyTorch's caching allocator: the segments it would reserve for a sequence of requests.

The rules are those of its `CachingAllocator.cpp` in c10 (torch 2.6 to 2.13, default settings): sizes are rounded up
to 512 bytes; requests up to 1 MiB share segments of 2 MiB, larger ones below 10 MiB segments of 20 MiB, and each other
request gets a dedicated segment, rounded up to 2 MiB. The smallest free block that fits is taken, and split if the
remainder is large enough. A freed block merges with its free neighbours in the segment. Segments stay reserved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20  # the largest request of the small pool
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for requests above SMALL_REQUEST and below OWN_SEGMENT
DEDICATED_SEGMENT = 10 << 20
ROUND_SEGMENT = 2 << 20


def round_request(num_bytes: int) -> int:
    """Size of a request, rounded up to a multiple of 512 bytes, at least 512."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(rounded: int) -> int:
    """Size of the segment to allocate when no free block fits a rounded request."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if rounded < DEDICATED_SEGMENT else -(-rounded // ROUND_SEGMENT) * ROUND_SEGMENT


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A part of a segment, allocated or free. Neighbours within the segment are linked."""

    address: int
    size: int
    pool: str
    free: bool = False
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None


class CachingAllocator:
    """Bytes in blocks (`allocated`) and in segments (`reserved`), with their peaks, on a device that never fills up."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._next_address = 1 << 40
        # Free blocks by pool, sorted by size and address: best fit is a bisection.
        self._free: dict[str, list[tuple[int, int, MemoryBlock]]] = {"small": [], "large": []}

    def malloc(self, num_bytes: int) -> MemoryBlock | None:
        """Allocate a block; None for zero bytes."""
        if num_bytes == 0:
            return None
        size = round_request(num_bytes)
        pool = "small" if size <= SMALL_REQUEST else "large"
        block = self._best_fit(pool, size) or self._new_segment(pool, size)
        remaining = block.size - size
        if remaining >= MIN_BLOCK if pool == "small" else remaining > SMALL_REQUEST:
            remainder = MemoryBlock(block.address + size, remaining, pool, previous=block, next=block.next)
            if remainder.next is not None:
                remainder.next.previous = remainder
            block.next, block.size = remainder, size
            self._insert_free(remainder)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Free a block; it merges with free neighbours in its segment."""
        if block is None:
            return
        assert not block.free, "a block is freed once"
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is None or not neighbour.free:
                continue
            self._remove_free(neighbour)
            first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
            first.size += second.size
            first.next = second.next
            if first.next is not None:
                first.next.previous = first
            block = first
        self._insert_free(block)

    def _best_fit(self, pool: str, size: int) -> MemoryBlock | None:
        free = self._free[pool]
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = free[index][2]
        self._remove_free(block)
        return block

    def _new_segment(self, pool: str, size: int) -> MemoryBlock:
        segment = segment_bytes(size)
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = MemoryBlock(self._next_address, segment, pool)
        self._next_address += segment + ROUND_SEGMENT  # a gap: segments are not adjacent
        return block

    def _insert_free(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _remove_free(self, block: MemoryBlock) -> None:
        block.free = False
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
