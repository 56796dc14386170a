"""PyTorch's caching allocator for CUDA, as arithmetic: which segments a sequence of requests would make it reserve.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.6 to 2.13, default settings): sizes are rounded up
to 512 bytes; requests up to 1 MiB share segments of 2 MiB, larger ones below 10 MiB segments of 20 MiB, the rest get a
segment of their own, rounded up to 2 MiB. The smallest free block that is large enough is taken, and split if enough
is left over. A freed block joins its free neighbours in the segment. Segments stay; only when the device runs out of
memory are those given back that are free as a whole. `expandable_segments` is modelled by one growing segment for each
pool, mapped in pages.
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

    def __init__(self, num_bytes: int, reserved: int) -> None:
        self.num_bytes, self.reserved = num_bytes, reserved
        super().__init__(f"out of memory: {num_bytes:,} bytes requested, {reserved:,} reserved")


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A stretch of a segment: handed out or free. Neighbours within the segment are linked."""

    address: int
    size: int
    pool: str
    stream: int
    free: bool = False
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


@dataclass(slots=True)
class _Growing:
    """An expandable segment: `end` is where its mapped pages end."""

    page: int
    start: int
    end: int
    last: MemoryBlock | None = None


class CachingAllocator:
    """Bytes that are handed out (`allocated`) and held from the device (`reserved`), with their peaks so far.

    capacity: bytes the device has for segments; 0 = no limit.
    """

    def __init__(self, capacity: int = 0, *, expandable_segments: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable_segments
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0  # how often cached segments were given back
        self._next_address = 1 << 40
        # Free blocks by (pool, stream) as sorted (size, address) and the block itself by address: best fit is a bisect.
        self._free: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._by_address: dict[int, MemoryBlock] = {}
        self._growing: dict[tuple[str, int], _Growing] = {}

    def malloc(self, num_bytes: int, stream: int = 0) -> MemoryBlock | None:
        """Hand out a block; None for zero bytes. Raises OutOfMemory if the device is full."""
        if num_bytes == 0:
            return None
        size = round_request(num_bytes)
        pool = "small" if size <= SMALL_REQUEST else "large"
        block = self._best_fit(pool, stream, size) or self._more(pool, stream, size)
        if block is None:
            self._release_cached()
            block = self._more(pool, stream, size)
        if block is None:
            raise OutOfMemory(size, self.reserved)
        left = block.size - size
        if left >= MIN_BLOCK if (pool == "small" or self.expandable) else left > SMALL_REQUEST:
            rest = MemoryBlock(block.address + size, left, pool, stream, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            growing = self._growing.get((pool, stream))
            if growing is not None and growing.last is block:
                growing.last = rest
            self._put_back(rest)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Take a block back; it joins free neighbours of its segment."""
        if block is None:
            return
        assert not block.free, "a block is freed once"
        self.allocated -= block.size
        growing = self._growing.get((block.pool, block.stream))
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._take_out(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if first.after is not None:
                first.after.before = first
            if growing is not None and growing.last is second:
                growing.last = first
            block = first
        self._put_back(block)

    def _best_fit(self, pool: str, stream: int, size: int) -> MemoryBlock | None:
        free = self._free.get((pool, stream), [])
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        block = self._by_address[free[place][1]]
        self._take_out(block)
        return block

    def _more(self, pool: str, stream: int, size: int) -> MemoryBlock | None:
        """A new segment, or in expandable mode more pages; None if the device is full."""
        if self.expandable:
            return self._grow(pool, stream, size)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        block = MemoryBlock(self._next_address, segment, pool, stream)
        self._next_address += segment + ROUND_SEGMENT  # segments are no neighbours
        return block

    def _grow(self, pool: str, stream: int, size: int) -> MemoryBlock | None:
        page = SMALL_SEGMENT if pool == "small" else LARGE_SEGMENT
        growing = self._growing.get((pool, stream))
        if growing is None:
            growing = self._growing[pool, stream] = _Growing(page, self._next_address, self._next_address)
            self._next_address += 1 << 44
        last = growing.last if growing.last is not None and growing.last.free else None
        needed = size - (last.size if last else 0)
        mapped = -(-needed // page) * page
        if not self._reserve(mapped):
            return None
        if last is None:
            last = MemoryBlock(growing.end, mapped, pool, stream, before=growing.last)
            if growing.last is not None:
                growing.last.after = last
        else:
            self._take_out(last)
            last.size += mapped
        growing.end += mapped
        growing.last = last
        return last

    def _reserve(self, num_bytes: int) -> bool:
        if self.capacity and self.reserved + num_bytes > self.capacity:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release_cached(self) -> None:
        """Give back every segment that is free as a whole; in expandable mode the free pages at a segment's end."""
        self.retries += 1
        for key, free in self._free.items():
            growing = self._growing.get(key)
            for _, address in list(free):
                block = self._by_address[address]
                if growing is not None:
                    if growing.last is block:
                        self._trim(growing, block)
                elif block.before is None and block.after is None:
                    self._take_out(block)
                    self.reserved -= block.size

    def _trim(self, growing: _Growing, last: MemoryBlock) -> None:
        mapped = -(-(last.address - growing.start) // growing.page) * growing.page + growing.start - last.address
        if mapped >= last.size:
            return
        self._take_out(last)
        self.reserved -= last.size - mapped
        growing.end -= last.size - mapped
        last.size = mapped
        if mapped:
            self._put_back(last)
            return
        growing.last = last.before
        if last.before is not None:
            last.before.after = None

    def _put_back(self, block: MemoryBlock) -> None:
        block.free = True
        insort(self._free.setdefault((block.pool, block.stream), []), (block.size, block.address))
        self._by_address[block.address] = block

    def _take_out(self, block: MemoryBlock) -> None:
        block.free = False
        free = self._free[block.pool, block.stream]
        del free[bisect_left(free, (block.size, block.address))]
        del self._by_address[block.address]
