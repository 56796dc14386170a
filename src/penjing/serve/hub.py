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
    MAX_WAITING,
    REQUEST_SECONDS,
    RETRY_SECONDS,
)

Numbered = list[tuple[int, Event]]
"""Events with the number of the answer they are of, counted through all prompts of a job."""


def full() -> ApiError:
    """There is no place. Made anew each time: one that is raised again keeps the frames of every time before."""
    return ApiError(429, "too many requests are waiting", code="queue_full", retry_after=RETRY_SECONDS)


class Job:
    """Requests that are answered to one client together. model: known when they are handed over."""

    def __init__(self, client: str) -> None:
        self.model, self.client = "", client
        self.open = 0  # answers that have not ended
        self.request_ids: list[int] = []
        self.events: Numbered = []  # that nobody has taken yet
        self.wake = asyncio.Event()
        self.whole = False  # wake only when all has ended
        self.first = 0.0  # when the first token came (`time.perf_counter`)


class Hub:
    """Hands requests to the engines, and their events to whoever waits for them. Used from the event loop alone.

    What the engines write is handed out at once where an answer begins or ends, or where nothing was of late; the rest
    gathers meanwhile, and goes out for all streams together so often that they write CHUNKS_PER_SECOND.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = sum(engine.capacity for engine in engines.values()) + MAX_WAITING
        self._jobs: dict[tuple[str, int], tuple[Job, int]] = {}
        self._open = 0
        self._open_of_client: Counter[str] = Counter()
        self._delivered: deque[tuple[str, list[Event]]] = deque()
        self._fresh: set[Job] = set()  # of which something came since all was handed out
        self._is_gathering = False
        self.thread = EngineThread(engines, self._deliver)

    def admit(self, client: str) -> Job:
        """A place for one answer. Raises ApiError if there is none: for all clients together, or for this one."""
        job = Job(client)
        self.enlarge(job, 1)
        return job

    def enlarge(self, job: Job, answers: int) -> None:
        """Places for so many answers more. Raises ApiError if there are none."""
        if self.is_full(job.client, answers):
            raise full()
        self._count(job, answers)

    def is_full(self, client: str, answers: int = 1) -> bool:
        """Whether there are no places for so many answers, whatever model is asked."""
        own = self._open_of_client[client]
        return self._open + answers > self._limit or own + answers > self._limit // 2

    def submit(self, job: Job, model: str, requests: Sequence[Request]) -> None:
        """Hand over the requests whose answers have their places. Raises ApiError if a value is refused."""
        job.model, first = model, 0
        try:
            for request in requests:
                request_id = self.thread.submit(model, request)
                job.request_ids.append(request_id)
                self._jobs[model, request_id] = (job, first)
                first += len(request.seeds)
        except UserError as error:
            raise from_user_error(error, error.where if isinstance(error.where, str) else None) from None

    def cancel(self, job: Job) -> None:
        """End what has not ended: nobody waits for it any more. Its slots are free by the engine's next step."""
        for request_id in job.request_ids:
            if self._jobs.pop((job.model, request_id), None) is not None and job.open:
                self.thread.cancel(job.model, request_id)
        self._count(job, -job.open)

    async def events(self, job: Job) -> AsyncIterator[Numbered]:
        """What the engine says, as it is handed out.

        Leaving early cancels the job. Raises ApiError when REQUEST_SECONDS are over.
        """
        deadline = self._loop.time() + REQUEST_SECONDS
        ended = False
        try:
            while not ended:
                async with asyncio.timeout_at(deadline):
                    await job.wake.wait()
                job.wake.clear()
                found, job.events = job.events, []
                ended = not job.open
                yield found
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

    # --- from the engines' thread to the loop -------------------------------------------------------------------------

    def _deliver(self, model: str, events: list[Event]) -> None:
        """Called in the engines' thread, once a step: it must cost that thread next to nothing."""
        self._delivered.append((model, events))
        if not self._is_gathering or any(self._is_urgent(model, event) for event in events):
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                self._loop.call_soon_threadsafe(self._wake)

    def _is_urgent(self, model: str, event: Event) -> bool:
        """Whether it ends an answer, or begins one."""
        job, _ = self._jobs.get((model, event.request_id), (None, 0))
        return bool(event.finish_reason) or job is None or not job.first

    def _wake(self) -> None:
        self._take()
        if not self._is_gathering:
            self._is_gathering = True
            self._hand_out()

    def _hand_out(self) -> None:
        """All that came; and again when more has gathered, until nothing has."""
        self._take()
        if not self._fresh:
            self._is_gathering = False
            if self._delivered:  # just now, and nobody is called for it
                self._wake()
            return
        answers = 0
        for job in self._fresh:
            if not job.whole:
                answers += max(1, job.open)
                if job.events:
                    job.wake.set()
        self._fresh.clear()
        self._loop.call_later(min(LONGEST_PAUSE, answers / CHUNKS_PER_SECOND or LONGEST_PAUSE), self._hand_out)

    def _take(self) -> None:
        """Sort what was delivered to its jobs, and wake those that have something urgent."""
        while self._delivered:
            model, events = self._delivered.popleft()
            for event in events:
                job, first = self._jobs.get((model, event.request_id), (None, 0))
                if job is None:
                    continue  # cancelled
                job.events.append((first + event.answer, event))
                self._fresh.add(job)
                if event.finish_reason:
                    self._count(job, -1)
                if not job.open or (not job.whole and (event.finish_reason or not job.first)):
                    job.wake.set()
                job.first = job.first or time.perf_counter()

    def _count(self, job: Job, change: int) -> None:
        job.open += change
        self._open += change
        self._open_of_client[job.client] += change
        if not self._open_of_client[job.client]:
            del self._open_of_client[job.client]
