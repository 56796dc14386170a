"""The allocator on a device that fills up, against other people's largest batches."""

from penjing.plan.memory.allocator import CachingAllocator, MemoryBlock, segment_bytes


class OutOfMemory(Exception):
    """The device has too little free memory for a request, even after all cached segments were released."""


class LimitedAllocator(CachingAllocator):
    """Releases completely free segments when the device is full, as `CUDACachingAllocator.cpp` does."""

    def __init__(self, capacity: int) -> None:
        """capacity: bytes available for segments."""
        super().__init__()
        self.capacity = capacity

    def _new_segment(self, pool: str, size: int) -> MemoryBlock:
        segment = segment_bytes(size)
        if self.reserved + segment > self.capacity:
            self._release_cached()
            if self.reserved + segment > self.capacity:
                raise OutOfMemory(f"{size:,} bytes requested, {self.reserved:,} reserved")
        return super()._new_segment(pool, size)

    def _release_cached(self) -> None:
        """Release every completely free segment."""
        for _, _, block in [*self._free["small"], *self._free["large"]]:
            if block.previous is None and block.next is None:
                self._remove_free(block)
                self.reserved -= block.size
