"""Between the event loop and the engines' thread: who may ask, whose tokens these are, and who has left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence

from penjing.base.errors import UserError
from penjing.infer.engine import Engine
from penjing.infer.engine_thread import EngineThread
from penjing.infer.requests import Event, Request
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.limits import (
    CHUNKS_PER_SECOND,
    LONGEST_PAUSE,
    LOOK_SECONDS,
    MAX_WAITING,
    REQUEST_SECONDS,
    RETRY_SECONDS,
)

Numbered = list[tuple[int, Event]]
"""Events with the number of the answer they are of, counted through all prompts of a job."""


FULL = ApiError(429, "too many requests are waiting", code="queue_full", retry_after=RETRY_SECONDS)


class Job:
    """Requests that are answered to one client together."""

    def __init__(self, model: str, client: str) -> None:
        self.model, self.client = model, client
        self.open = 0  # answers that have not ended
        self.tickets: list[int] = []
        self.events: Numbered = []  # that nobody has taken yet
        self.wake = asyncio.Event()
        self.whole = False  # wake only when all has ended
        self.first = 0.0  # when the first token came (`time.perf_counter`)


class Hub:
    """Hands requests to the engines, and their events to whoever waits for them. Used from the event loop alone."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = {name: engine.capacity + MAX_WAITING for name, engine in engines.items()}
        self._jobs: dict[tuple[str, int], tuple[Job, int]] = {}
        self._open: Counter[str] = Counter()
        self._open_of_client: Counter[tuple[str, str]] = Counter()
        self._delivered: deque[tuple[str, list[Event]]] = deque()
        self._is_awake = False
        self.thread = EngineThread(engines, self._deliver)

    def admit(self, model: str, client: str, answers: int) -> Job:
        """Places for so many answers. Raises ApiError if there are none: for all clients together, or for this one."""
        limit = self._limits[model]
        if self._open[model] + answers > limit or self._open_of_client[model, client] + answers > limit // 2:
            raise FULL
        job = Job(model, client)
        self._count(job, answers)
        return job

    def check(self, client: str) -> None:
        """Raises ApiError, before anything is read, if no model has a place for this client."""
        if all(
            self._open[model] >= limit or self._open_of_client[model, client] >= limit // 2
            for model, limit in self._limits.items()
        ):
            raise FULL

    def submit(self, job: Job, requests: Sequence[Request]) -> None:
        """Hand over the requests whose answers have their places. Raises ApiError if a value is refused."""
        first = 0
        try:
            for request in requests:
                ticket = self.thread.submit(job.model, request)
                job.tickets.append(ticket)
                self._jobs[job.model, ticket] = (job, first)
                first += len(request.seeds)
        except UserError as error:
            raise from_user_error(error, error.where if isinstance(error.where, str) else None) from None

    def cancel(self, job: Job) -> None:
        """End what has not ended: nobody waits for it any more. Its slots are free by the engine's next step."""
        for ticket in job.tickets:
            if self._jobs.pop((job.model, ticket), None) is not None and job.open:
                self.thread.cancel(job.model, ticket)
        self._count(job, -job.open)

    async def events(self, job: Job) -> AsyncIterator[Numbered]:
        """What the engine says, as it comes: the first at once, and then so often that all streams together write
        CHUNKS_PER_SECOND at the most.

        Leaving early cancels the job. Raises ApiError when REQUEST_SECONDS are over.
        """
        deadline = self._loop.time() + REQUEST_SECONDS
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    await job.wake.wait()
                job.wake.clear()
                found, job.events = job.events, []
                ended = not job.open
                yield found
                if ended:
                    return
                await asyncio.sleep(min(LONGEST_PAUSE, len(self._jobs) / CHUNKS_PER_SECOND))
        except TimeoutError:
            raise ApiError(503, f"no answer within {REQUEST_SECONDS:g} seconds", code="timeout") from None
        finally:
            self.cancel(job)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Numbers of each engine, by the names that /metrics gives them."""
        growing = ("steps", "tokens_read", "tokens_shared", "tokens_written", "busy_seconds")
        return {
            model: {f"{name}_total" if name in growing else name: value for name, value in numbers.items()}
            for model, numbers in self.thread.statistics().items()
        }

    def close(self) -> None:
        """End the engines' thread; what still runs is cancelled."""
        self.thread.close()

    def _deliver(self, model: str, events: list[Event]) -> None:
        """Called in the engines' thread, once a step: it must cost that thread next to nothing."""
        self._delivered.append((model, events))
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """Hand out what was delivered, and look again soon; where nothing came since, wait to be called."""
        if not self._delivered:
            self._is_awake = False
            if not self._delivered:  # nor just now
                return
            self._is_awake = True
        while self._delivered:
            self._take(*self._delivered.popleft())
        self._loop.call_later(LOOK_SECONDS, self._wake)

    def _take(self, model: str, events: list[Event]) -> None:
        for event in events:
            job, first = self._jobs.get((model, event.ticket), (None, 0))
            if job is None:
                continue  # cancelled
            job.events.append((first + event.answer, event))
            job.first = job.first or time.perf_counter()
            if event.ended:
                self._count(job, -1)
            if not (job.whole and job.open):
                job.wake.set()

    def _count(self, job: Job, change: int) -> None:
        job.open += change
        self._open[job.model] += change
        self._open_of_client[job.model, job.client] += change
        if not self._open_of_client[job.model, job.client]:
            del self._open_of_client[job.model, job.client]
