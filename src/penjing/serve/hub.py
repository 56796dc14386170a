"""Between the event loop and the engine thread: admission, routing of events, and cancellation."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence

from penjing.base.errors import UserError
from penjing.infer.engine import Engine
from penjing.infer.engine_thread import EngineThread
from penjing.infer.requests import Event, Request
from penjing.serve.errors import ApiError, from_user_error
from penjing.serve.limits import (
    BURST_REQUESTS,
    BURST_SECONDS,
    CHUNKS_PER_SECOND,
    ITERATIONS_PER_REQUEST,
    LONGEST_PAUSE,
    MAX_BEGIN_WAITS,
    MAX_WAITING,
    REQUEST_SECONDS,
    RETRY_SECONDS,
    STEP_PAUSE,
)

Batches = list[tuple[int, list[Event]]]
"""Events by the number of their answer; answers are numbered through all prompts of a job."""


def queue_full() -> ApiError:
    """The queue is full. A new object each time: an exception that is raised again keeps all earlier frames."""
    return ApiError(429, "too many requests are waiting", code="queue_full", retry_after=RETRY_SECONDS)


class Job:
    """The engine requests of one HTTP request. model: set by `Hub.submit`."""

    def __init__(self, client: str) -> None:
        self.model, self.client = "", client
        self.num_open = 0  # answers that have not ended
        self.request_ids: list[int] = []
        self.events: defaultdict[int, list[Event]] = defaultdict(list)  # by answer; not yet taken by `Hub.events`
        self.wake = asyncio.Event()
        self.collect_all = False  # wake only when all answers have ended
        self.is_heavy = False  # it took memory that malloc may keep
        self.is_late = False  # REQUEST_SECONDS have passed
        self.first_token_at = 0.0  # `time.perf_counter` of the first event

    def expire(self) -> None:
        self.is_late = True
        self.wake.set()


class Hub:
    """Passes requests to the engines, and events back to their jobs. Used from the event loop only.

    Events are delivered at once if an answer begins or ends, or if nothing was delivered recently. Other events are
    batched and delivered for all streams together, so that all streams write CHUNKS_PER_SECOND in total.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = sum(engine.capacity for engine in engines.values()) + MAX_WAITING
        self._jobs: dict[str, dict[int, tuple[Job, int]]] = {model: {} for model in engines}  # by request_id
        self._open = 0
        self._open_of_client: Counter[str] = Counter()
        self._inbox: deque[tuple[str, list[Event]]] = deque()
        self._pending_jobs: set[Job] = set()  # with events since the last flush
        self._unstarted: set[Job] = set()  # without events so far
        self._is_batching = False
        self._arrivals = deque([0.0] * BURST_REQUESTS, maxlen=BURST_REQUESTS)  # times of the last requests
        self._begin_lock = asyncio.Lock()
        self.thread = EngineThread(engines, self._on_events, self._wait_to_step)
        self.statistics = self.thread.statistics

    def reserve(self, job: Job, answers: int) -> None:
        """Reserve places for answers. Raises ApiError if the queue, or this client's share of it, has not enough."""
        if self.is_full(job.client, answers):
            raise queue_full()
        self._count(job, answers)

    def is_full(self, client: str, answers: int = 1) -> bool:
        """Whether there are not enough places. All models share one queue."""
        client_open = self._open_of_client[client]
        return self._open + answers > self._limit or client_open + answers > self._limit // 2

    def submit(self, job: Job, model: str, requests: Sequence[Request]) -> None:
        """Submit requests whose answers have places. Raises ApiError if a value is invalid."""
        job.model, offset = model, 0
        self._unstarted.add(job)
        try:
            for request in requests:
                request_id = self.thread.submit(model, request)
                job.request_ids.append(request_id)
                self._jobs[model][request_id] = (job, offset)
                offset += len(request.seeds)
        except UserError as error:
            raise from_user_error(error, error.where if isinstance(error.where, str) else None) from None

    def cancel(self, job: Job) -> None:
        """End the unfinished answers. Their slots are free in the engine's next step."""
        self._unstarted.discard(job)
        for request_id in job.request_ids:
            if self._jobs[job.model].pop(request_id, None) is not None and job.num_open:
                self.thread.cancel(job.model, request_id)
        self._count(job, -job.num_open)

    async def events(self, job: Job) -> AsyncIterator[Batches]:
        """The job's events in batches. Closing the generator early cancels the job. Raises ApiError after
        REQUEST_SECONDS."""
        timer = self._loop.call_later(REQUEST_SECONDS, job.expire)
        ended = False
        try:
            while not ended:
                await job.wake.wait()
                job.wake.clear()
                if job.is_late and job.num_open:
                    raise ApiError(503, f"no answer within {REQUEST_SECONDS:g} seconds", code="timeout")
                batches = sorted(job.events.items())
                job.events.clear()
                ended = not job.num_open
                yield batches
        finally:
            timer.cancel()
            self.cancel(job)

    def close(self) -> None:
        self.thread.close()

    # --- the event loop first -----------------------------------------------------------------------------------------

    def count_arrival(self) -> None:
        self._arrivals.append(time.monotonic())

    async def wait_to_begin(self) -> None:
        """Wait until the event loop has handled all requests that are there, and then for at most one answer at a time:
        to begin an answer takes more than twice as long as to refuse one."""
        async with self._begin_lock:
            for _ in range(MAX_BEGIN_WAITS):
                last_arrival = self._arrivals[-1]
                for _ in range(ITERATIONS_PER_REQUEST):
                    await asyncio.sleep(0)
                if self._arrivals[-1] == last_arrival:
                    return

    def _wait_to_step(self) -> None:
        """Called in the engine thread: in a burst of requests, wait for STEP_PAUSE at most. Only one of the two threads
        can run Python code. While the engine steps, the event loop waits for it after each system call."""
        end = time.monotonic() + STEP_PAUSE
        while (now := time.monotonic()) < end and now - self._arrivals[0] < BURST_SECONDS:
            time.sleep(0.001)

    # --- from the engine thread to the event loop ---------------------------------------------------------------------

    def _on_events(self, model: str, events: list[Event]) -> None:
        """Called in the engine thread once per step, so it must be cheap."""
        self._inbox.append((model, events))
        is_urgent = self._unstarted or any(event.finish_reason for event in events)
        if is_urgent or not self._is_batching:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._distribute()
        if not self._is_batching:
            self._is_batching = True
            self._flush()

    def _flush(self) -> None:
        """Deliver all events, and schedule the next flush until no new events come."""
        self._distribute()
        if not self._pending_jobs:
            self._is_batching = False
            if self._inbox:  # arrived just now, without a call of _wake
                self._wake()
            return
        answers = 0
        for job in self._pending_jobs:
            if not job.collect_all:
                answers += max(1, job.num_open)
                if job.events:
                    job.wake.set()
        self._pending_jobs.clear()
        self._loop.call_later(min(LONGEST_PAUSE, answers / CHUNKS_PER_SECOND or LONGEST_PAUSE), self._flush)

    def _distribute(self) -> None:
        """Route new events to their jobs, and wake jobs with urgent ones."""
        while self._inbox:
            model, events = self._inbox.popleft()
            jobs = self._jobs[model]
            for event in events:
                job, offset = jobs.get(event.request_id, (None, 0))
                if job is None:
                    continue  # cancelled
                job.events[offset + event.answer].append(event)
                self._pending_jobs.add(job)
                if event.finish_reason or not job.first_token_at:
                    self._begin_or_end(job, event)

    def _begin_or_end(self, job: Job, event: Event) -> None:
        """The first event of a job, or the last one of an answer: wake the job."""
        if event.finish_reason:
            self._count(job, -1)
        if not job.first_token_at:
            job.first_token_at = time.perf_counter()
            self._unstarted.discard(job)
        if not job.num_open or not job.collect_all:
            job.wake.set()

    def _count(self, job: Job, change: int) -> None:
        job.num_open += change
        self._open += change
        self._open_of_client[job.client] += change
        if not self._open_of_client[job.client]:
            del self._open_of_client[job.client]
