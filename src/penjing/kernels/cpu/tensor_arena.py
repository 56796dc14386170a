"""An allocator for the large tensors of a CPU training step: freed memory is reused for the next tensor of that size.

torch asks glibc for aligned memory. A freed block is a few bytes too small for the next aligned tensor of its size, so
small objects fill it and the heap grows. A third of the 1.2 GiB that a step of a 26M model held was such gaps. Here
sizes are multiples of a cache line, small objects are elsewhere, and adjacent free blocks are merged.
"""

import bisect
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LINE = 64  # bytes: a cache line, and the widest load of a vector unit
MIN_BYTES = 1 << 19  # bytes; torch allocates smaller tensors
SLAB = 1 << 27  # bytes allocated at a time; untouched pages take no memory


class _Block(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to the array under a tensor: it dies with the last tensor on it."""

    __slots__ = ("end", "start")
    start: int
    end: int


class Arena:
    """First-fit allocation from slabs, by lowest address. Thread-safe."""

    def __init__(self, slab_bytes: int = SLAB) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._edges: list[int] = []  # where each slab starts, in one address space over all slabs
        self._starts: list[int] = []  # of free blocks, in order
        self._ends: list[int] = []
        self._taken: dict[int, _Block] = {}  # by start
        self._freed: deque[_Block] = deque()  # not yet in the free list: arrays may die at any time, in any thread
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor. Raises MemoryError."""
        count = math.prod(shape)
        if count * dtype.itemsize < MIN_BYTES:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            array = self._take(-(-count * dtype.itemsize // LINE) * LINE)
        return torch.frombuffer(array, dtype=dtype, count=count).view(shape)

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        if self._freed:
            self._collect()
        starts, ends = self._starts, self._ends
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):  # noqa: B007
            if end - start >= size:
                break
        else:
            self._add_slab(size)
            index = len(starts) - 1
        start = starts[index]
        if ends[index] - start == size:
            del starts[index], ends[index]
        else:
            starts[index] = start + size
        slab = bisect.bisect_right(self._edges, start) - 1
        first = start - self._edges[slab]
        array = self._slabs[slab][first : first + size]
        block = _Block(array, self._freed.append)
        block.start, block.end = start, start + size
        self._taken[start] = block
        return array

    def _add_slab(self, size: int) -> None:
        size = max(size, self._slab_bytes)
        memory = np.empty(size + LINE, dtype=np.uint8)
        first = -memory.ctypes.data % LINE
        edge = (
            self._edges[-1] + len(self._slabs[-1]) + LINE if self._slabs else 0
        )  # a gap, so that blocks of two slabs are never merged
        self._slabs.append(memory[first : first + size])
        self._edges.append(edge)
        self._starts.append(edge)
        self._ends.append(edge + size)

    def _collect(self) -> None:
        """Return freed blocks to the free list."""
        starts, ends, freed = self._starts, self._ends, self._freed
        while freed:
            block = freed.popleft()
            start, end = block.start, block.end
            del self._taken[start]
            index = bisect.bisect_left(starts, start)
            follows = index > 0 and ends[index - 1] == start
            if index < len(starts) and starts[index] == end:
                if follows:
                    ends[index - 1] = ends.pop(index)
                    del starts[index]
                else:
                    starts[index] = start
            elif follows:
                ends[index - 1] = end
            else:
                starts.insert(index, start)
                ends.insert(index, end)


_arena = Arena()


def _reset_after_fork() -> None:
    """In a forked child: another thread of the parent may have held the lock or been in the middle of a change."""
    global _arena
    _arena = Arena()


os.register_at_fork(after_in_child=_reset_after_fork)
_is_disabled: ContextVar[bool] = ContextVar("disabled", default=False)


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, torch allocates: for fake tensors that claim to be on a CPU."""
    token = _is_disabled.set(True)
    try:
        yield
    finally:
        _is_disabled.reset(token)


def is_disabled() -> bool:
    return _is_disabled.get()


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor on the device of `like`."""
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.new_empty(shape, dtype=dtype)
    if type(like) not in (Tensor, torch.nn.Parameter) or _is_disabled.get():  # fake tensors
        return like.new_empty(shape, dtype=dtype)
    return _arena.empty(shape, dtype)


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of x's shape and dtype."""
    return empty(x, x.shape, x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`: x itself if it has that dtype, else a copy."""
    return x.to(dtype) if x.dtype == dtype or torch.compiler.is_compiling() else empty(x, x.shape, dtype).copy_(x)


def matmul(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """left @ right."""
    if torch.compiler.is_compiling():
        return left_MK @ right_KN
    return torch.mm(left_MK, right_KN, out=empty(left_MK, (len(left_MK), right_KN.shape[1]), left_MK.dtype))
