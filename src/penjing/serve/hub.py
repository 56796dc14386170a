"""Between the event loop and the engine's thread: who may ask, whose tokens these are, and who has left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from penjing.base.errors import UserError
from penjing.infer.engine import Engine
from penjing.infer.engine_thread import EngineThread
from penjing.infer.requests import Event, Request
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.limits import FLUSH_SECONDS, MAX_WAITING, REQUEST_SECONDS, RETRY_SECONDS


class Job:
    """One request under way: what the engine has said of it and nobody has taken yet."""

    def __init__(self, model: str, client: str, answers: int) -> None:
        self.model, self.client, self.open = model, client, answers  # open: answers that have not ended
        self.ticket = -1
        self.events: list[Event] = []
        self.wake = asyncio.Event()
        self.to_the_end = False  # wake only when all has ended


class Hub:
    """Hands requests to the engines and their events to whoever waits for them. Used from the event loop alone."""

    def __init__(self, engines: Mapping[str, Engine], slots: Mapping[str, int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = {name: number + MAX_WAITING for name, number in slots.items()}
        self._jobs: dict[tuple[str, int], Job] = {}
        self._open: Counter[str] = Counter()
        self._open_of_client: Counter[tuple[str, str]] = Counter()
        self.thread = EngineThread(engines, self._deliver)

    def check(self, model: str, client: str, answers: int) -> None:
        """Raises ApiError if so many more answers cannot wait: for all clients together, or for this one."""
        limit = self._limits[model]
        if self._open[model] + answers > limit or self._open_of_client[model, client] + answers > (limit + 1) // 2:
            raise ApiError(429, "too many requests are waiting", code="queue_full", retry_after=RETRY_SECONDS)

    def submit(self, model: str, request: Request) -> Job:
        """Hand a request over. Raises ApiError if the queue is full or a value is refused."""
        answers = len(request.seeds)
        self.check(model, request.client, answers)
        job = Job(model, request.client, answers)
        try:
            job.ticket = self.thread.submit(model, request)
        except UserError as error:
            raise from_user_error(error, error.where if isinstance(error.where, str) else None) from None
        self._jobs[model, job.ticket] = job
        self._count(job, answers)
        return job

    def cancel(self, job: Job) -> None:
        """End a request that nobody waits for any more; its slots are free by the engine's next step."""
        if self._jobs.pop((job.model, job.ticket), None) is not None:
            self._count(job, -job.open)
            job.open = 0
            self.thread.cancel(job.model, job.ticket)

    async def events(self, job: Job) -> AsyncIterator[list[Event]]:
        """What the engine says, as it comes: the first at once, later ones FLUSH_SECONDS together.

        Leaving early cancels the request. Raises ApiError when REQUEST_SECONDS are over.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                while True:
                    await job.wake.wait()
                    job.wake.clear()
                    found, job.events = job.events, []
                    ended = not job.open
                    yield found
                    if ended:
                        return
                    await asyncio.sleep(FLUSH_SECONDS)
        except TimeoutError:
            raise ApiError(503, f"no answer within {REQUEST_SECONDS:g} seconds", code="timeout") from None
        finally:
            self.cancel(job)

    def close(self) -> None:
        """End the engine's thread; what still runs is cancelled."""
        self.thread.close()

    def _deliver(self, model: str, events: list[Event]) -> None:
        """Called in the engine's thread, once a step."""
        try:
            self._loop.call_soon_threadsafe(self._take, model, events)
        except RuntimeError:  # the loop has ended, and nobody waits any more
            return

    def _take(self, model: str, events: list[Event]) -> None:
        for event in events:
            job = self._jobs.get((model, event.ticket))
            if job is None:
                continue  # cancelled
            job.events.append(event)
            if event.ended:
                job.open -= 1
                self._count(job, -1)
                if not job.open:
                    del self._jobs[model, event.ticket]
            if not (job.to_the_end and job.open):
                job.wake.set()

    def _count(self, job: Job, change: int) -> None:
        self._open[job.model] += change
        self._open_of_client[job.model, job.client] += change
        if not self._open_of_client[job.model, job.client]:
            del self._open_of_client[job.model, job.client]
