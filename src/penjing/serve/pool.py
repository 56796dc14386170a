"""Work in threads, where clients take turns."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penjing.serve.errors import ApiError
from penjing.serve.limits import RETRY_SECONDS

Result = TypeVar("Result")


class FairPool:
    """Runs one function of a client at a time, and so many of all clients; others wait in order. Used from the event
    loop only. places: what may run and wait; places_of_client: of these, for one client.

    The threads are its own, so that slow work delays no tokenization.
    """

    def __init__(self, name: str, threads: int, places: int, places_of_client: int) -> None:
        self._name, self._places, self._places_of_client = name, places, places_of_client
        self._threads = ThreadPoolExecutor(threads, name)
        self._free = asyncio.Semaphore(threads)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: Counter[str] = Counter()

    async def run(self, client: str, function: Callable[[], Result]) -> Result:
        """What the function returns. Raises ApiError if all places, or those of the client, are taken."""
        if self._open.total() >= self._places or self._open[client] >= self._places_of_client:
            raise ApiError(429, f"too many {self._name} are waiting", code="queue_full", retry_after=RETRY_SECONDS)
        self._open[client] += 1
        try:
            async with self._turns[client], self._free:
                return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client], self._turns[client]

    def close(self) -> None:
        """Start nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
