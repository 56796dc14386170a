"""Independent pieces of work on a CPU, a thread for each core, with one torch thread in each.

Many small operations one after the other are slow on many threads: each waits for the slowest of its parts, and on a
machine that is busy with something else each waits long. Pieces that need nothing of each other wait once, at the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from penjing.kernels.cpu import tensor_arena as arena

Piece = TypeVar("Piece")
PIECES = 4  # for each thread, or it is not worth it

_pools: dict[int, ThreadPoolExecutor] = {}  # by their number of threads
os.register_at_fork(after_in_child=_pools.clear)  # a child has none of the threads


def _pool(num_threads: int) -> ThreadPoolExecutor:
    if num_threads not in _pools:
        pool = _pools[num_threads] = ThreadPoolExecutor(num_threads, thread_name_prefix="penjing-side-by-side")
        everyone = Barrier(num_threads)

        def settle(_: int) -> None:
            torch.get_num_threads()  # torch sets a thread up when it first asks, and would undo what came before
            torch.set_num_threads(1)
            everyone.wait()

        list(pool.map(settle, range(num_threads)))
        torch.set_num_threads(num_threads)  # what a thread sets is what later threads begin with
    return _pools[num_threads]


def side_by_side(work: Callable[[Iterator[Piece]], None], pieces: Sequence[Piece]) -> None:
    """Call `work` once in each of torch's threads, with an iterator that hands every piece to one of them.

    Which thread gets which piece is left to chance, so a piece must come to the same whoever does it. No gradients are
    recorded inside. With one torch thread, or few pieces, this is `work(iter(pieces))`: the last pieces of a few large
    ones would leave threads without work. So it is for stand-ins without memory, as other threads know of none.
    """
    shared = iter(pieces)
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(pieces) < PIECES * num_threads or arena.is_set_aside():
        with torch.no_grad():
            work(shared)
        return
    inference = torch.is_inference_mode_enabled()

    def run(_: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(shared)

    list(_pool(num_threads).map(run, range(num_threads)))
