"""PyTorch's caching allocator for CUDA, as arithmetic: which segments a sequence of requests would make it reserve.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.6 to 2.13, default settings): sizes are rounded up
to 512 bytes; requests up to 1 MiB share segments of 2 MiB, larger ones below 10 MiB segments of 20 MiB, the rest get a
segment of their own, rounded up to 2 MiB. The smallest free block that is large enough is taken, and split if enough
is left over. A freed block joins its free neighbours in the segment. Segments stay; only when the device runs out of
memory are those given back that are free as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20  # the largest request of the small pool
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20  # for requests above SMALL_REQUEST and below OWN_SEGMENT
OWN_SEGMENT = 10 << 20
ROUND_SEGMENT = 2 << 20


def round_request(num_bytes: int) -> int:
    """What a request takes up: a multiple of 512 bytes, at least one of them."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(rounded: int) -> int:
    """Size of the segment that is asked of the device when no free block fits a rounded request."""
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if rounded < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-rounded // ROUND_SEGMENT) * ROUND_SEGMENT


class OutOfMemory(Exception):
    """The device has too little free memory for a request, even after all cached segments were given back."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A stretch of a segment: handed out or free. Neighbours within the segment are linked."""

    address: int
    size: int
    pool: str
    free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


class CachingAllocator:
    """Bytes that are handed out (`allocated`) and held from the device (`reserved`), with their peaks so far.

    capacity: bytes the device has for segments; 0 = no limit.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._next_address = 1 << 40
        # Free blocks by pool, sorted by size and address: best fit is a bisect.
        self._free: dict[str, list[tuple[int, int, MemoryBlock]]] = {"small": [], "large": []}

    def malloc(self, num_bytes: int) -> MemoryBlock | None:
        """Hand out a block; None for zero bytes. Raises OutOfMemory if the device is full."""
        if num_bytes == 0:
            return None
        size = round_request(num_bytes)
        pool = "small" if size <= SMALL_REQUEST else "large"
        block = self._best_fit(pool, size) or self._new_segment(pool, size)
        left = block.size - size
        if left >= MIN_BLOCK if pool == "small" else left > SMALL_REQUEST:
            rest = MemoryBlock(block.address + size, left, pool, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._put_back(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Take a block back; it joins free neighbours of its segment."""
        if block is None:
            return
        assert not block.free, "a block is freed once"
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._take_out(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if first.after is not None:
                first.after.before = first
            block = first
        self._put_back(block)

    def _best_fit(self, pool: str, size: int) -> MemoryBlock | None:
        free = self._free[pool]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        block = free[place][2]
        self._take_out(block)
        return block

    def _new_segment(self, pool: str, size: int) -> MemoryBlock:
        """One that is asked of the device, if it must be with what is cached given back."""
        segment = segment_bytes(size)
        if self.capacity and self.reserved + segment > self.capacity:
            self._release_cached()
            if self.reserved + segment > self.capacity:
                raise OutOfMemory(f"{size:,} bytes requested, {self.reserved:,} reserved")
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = MemoryBlock(self._next_address, segment, pool)
        self._next_address += segment + ROUND_SEGMENT  # segments are no neighbours
        return block

    def _release_cached(self) -> None:
        """Give back every segment that is free as a whole."""
        for _, _, block in [*self._free["small"], *self._free["large"]]:
            if block.before is None and block.after is None:
                self._take_out(block)
                self.reserved -= block.size

    def _put_back(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _take_out(self, block: MemoryBlock) -> None:
        block.free = False
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
