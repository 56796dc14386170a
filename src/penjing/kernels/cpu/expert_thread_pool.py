"""Runs independent items of work on a CPU: a thread per core, each with one torch thread.

Many small operations in a row are slow on many threads: each operation waits for its slowest thread, and on a busy
machine each waits long. Independent items wait once, at the end.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from penjing.kernels.cpu import tensor_arena as arena

Item = TypeVar("Item")
MIN_ITEMS = 4  # per thread; with fewer, threads do not pay

_pools: dict[int, ThreadPoolExecutor] = {}  # by number of threads
os.register_at_fork(after_in_child=_pools.clear)  # a forked child has none of the threads


def _pool(num_threads: int) -> ThreadPoolExecutor:
    if num_threads not in _pools:
        pool = _pools[num_threads] = ThreadPoolExecutor(num_threads, thread_name_prefix="penjing-side-by-side")
        barrier = Barrier(num_threads)

        def init_thread(_: int) -> None:
            torch.get_num_threads()  # torch initialises a thread on its first call, which would reset the number
            torch.set_num_threads(1)
            barrier.wait()

        list(pool.map(init_thread, range(num_threads)))
        torch.set_num_threads(num_threads)  # later threads start with the number that was set last
    return _pools[num_threads]


def run_in_threads(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Call `work` in as many threads as torch has, with one iterator that gives each item to one of them.

    The assignment of items to threads varies, so an item's result must not depend on its thread. No gradients are
    recorded. With one torch thread or few items, this is `work(iter(items))`: with a few large items some threads would
    idle at the end. The same for fake tensors, as other threads are not in fake mode.
    """
    iterator = iter(items)
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(items) < MIN_ITEMS * num_threads or arena.is_disabled():
        with torch.no_grad():
            work(iterator)
        return
    inference = torch.is_inference_mode_enabled()

    def run(_: int) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(iterator)

    list(_pool(num_threads).map(run, range(num_threads)))
