"""Where the large tensors of a step on a CPU live: what one frees, the next of the same size takes again.

torch asks the C library for aligned memory, and a block that glibc gets back is some bytes too small for the next
aligned tensor of its size; small objects settle in it, and the heap grows. Of the 1.2 GiB that a step of a 26M model
held, a third was such gaps. Here sizes are whole cache lines, small objects are elsewhere, and free neighbours become
one.
"""

from __future__ import annotations

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
SMALLEST = 1 << 19  # bytes; what is smaller is left to torch
SLAB = 1 << 27  # bytes asked for at a time; those that are never touched take no memory


class _Block(weakref.ref):  # type: ignore[type-arg]
    """Tells when the array that a tensor stands on is gone, which is when the last tensor on it is."""

    __slots__ = ("end", "start")
    start: int
    end: int


class Arena:
    """Memory in slabs, handed out at the lowest address that fits. Any thread may take and free."""

    def __init__(self, slab_bytes: int = SLAB) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[npt.NDArray[np.uint8]] = []
        self._edges: list[int] = []  # where each slab begins, counted over all slabs
        self._starts: list[int] = []  # of what is free, in order
        self._ends: list[int] = []
        self._taken: dict[int, _Block] = {}  # by where they start
        self._freed: deque[_Block] = deque()  # not yet among the free: arrays may go at any moment, in any thread
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        """Held by tensors now."""
        with self._lock:
            self._collect()
            return sum(block.end - block.start for block in self._taken.values())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of any values. Raises MemoryError."""
        count = math.prod(shape)
        if count * dtype.itemsize < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            array = self._take(-(-count * dtype.itemsize // LINE) * LINE)
        return torch.frombuffer(array, dtype=dtype, count=count).view(shape)

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        if self._freed:
            self._collect()
        starts, ends = self._starts, self._ends
        for place, (start, end) in enumerate(zip(starts, ends, strict=True)):  # noqa: B007
            if end - start >= size:
                break
        else:
            self._grow(size)
            place = len(starts) - 1
        start = starts[place]
        if ends[place] - start == size:
            del starts[place], ends[place]
        else:
            starts[place] = start + size
        slab = bisect.bisect_right(self._edges, start) - 1
        first = start - self._edges[slab]
        array = self._slabs[slab][first : first + size]
        block = _Block(array, self._freed.append)
        block.start, block.end = start, start + size
        self._taken[start] = block
        return array

    def _grow(self, size: int) -> None:
        size = max(size, self._slab_bytes)
        room = np.empty(size + LINE, dtype=np.uint8)
        first = -room.ctypes.data % LINE
        edge = self._edges[-1] + len(self._slabs[-1]) + LINE if self._slabs else 0  # what is in two never becomes one
        self._slabs.append(room[first : first + size])
        self._edges.append(edge)
        self._starts.append(edge)
        self._ends.append(edge + size)

    def _collect(self) -> None:
        """Take what was freed back among the free."""
        starts, ends, freed = self._starts, self._ends, self._freed
        while freed:
            block = freed.popleft()
            start, end = block.start, block.end
            del self._taken[start]
            place = bisect.bisect_left(starts, start)
            follows = place > 0 and ends[place - 1] == start
            if place < len(starts) and starts[place] == end:
                if follows:
                    ends[place - 1] = ends.pop(place)
                    del starts[place]
                else:
                    starts[place] = start
            elif follows:
                ends[place - 1] = end
            else:
                starts.insert(place, start)
                ends.insert(place, end)


_arena = Arena()


def _begin_anew() -> None:
    """In a process that was forked: another thread of its parent may have held the lock, or been amid a change."""
    global _arena
    _arena = Arena()


os.register_at_fork(after_in_child=_begin_anew)
_is_aside: ContextVar[bool] = ContextVar("aside", default=False)


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, torch allocates: for tensors that say they are on a CPU and stand in for others without memory."""
    token = _is_aside.set(True)
    try:
        yield
    finally:
        _is_aside.reset(token)


def is_set_aside() -> bool:
    return _is_aside.get()


def empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of any values on the device of `like`."""
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.new_empty(shape, dtype=dtype)
    if type(like) not in (Tensor, torch.nn.Parameter) or _is_aside.get():  # stand-ins without memory
        return like.new_empty(shape, dtype=dtype)
    return _arena.empty(shape, dtype)


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of any values, of x's shape and dtype."""
    return empty(x, x.shape, x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`: itself where it is, else a copy."""
    if x.dtype == dtype or torch.compiler.is_compiling():
        return x.to(dtype)
    return empty(x, x.shape, dtype).copy_(x)


def matmul(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """left @ right."""
    if torch.compiler.is_compiling():
        return left_MK @ right_KN
    return torch.mm(left_MK, right_KN, out=empty(left_MK, (len(left_MK), right_KN.shape[1]), left_MK.dtype))
