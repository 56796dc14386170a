"""Running requests, and the queue in which clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penjing.infer.requests import Request, Token, TokenMask

MAX_CLIENTS_TRIED = 16  # per step: a thousand clients may wait for the same prefix


@dataclass(slots=True, eq=False)
class Answer:
    job: Job
    number: int
    seed: int
    slot: int = -1  # none
    ids: list[int] = field(default_factory=list)  # generated so far, of an answer that lost its slot
    turns: list[int] = field(default_factory=list)  # index in the answer where each turn after the first begins
    grammar: TokenMask | None = None
    is_reported: bool = False  # an event was emitted for it


@dataclass(slots=True, eq=False)
class Job:
    """A request with unfinished answers. Its prompt is computed once, by the first of its answers."""

    request_id: int
    request: Request
    prompt: NDArray[np.int32]
    adapter: int
    waiting: deque[Answer] = field(default_factory=deque)
    active: list[Answer] = field(default_factory=list)
    is_prefilled: bool = False
    logits_1V: Tensor | None = None  # after the prompt, for answers that have not started
    cached_tokens: int = 0  # prompt tokens that were already in a slot
    prompt_logprobs: list[Token] = field(default_factory=list)  # if requested
    is_queued: bool = False
    is_over: bool = False

    @property
    def client(self) -> str:
        return self.request.client


class JobQueue:
    """Jobs with waiting answers. First in, first out for each client; clients take turns."""

    def __init__(self) -> None:
        self.size = 0
        self._by_client: dict[str, deque[Job]] = {}
        self._turns: deque[str] = deque()

    def add(self, job: Job, *, at_front: bool = False) -> None:
        """at_front: before the client's other jobs."""
        if job.is_queued:
            return
        if job.client not in self._by_client:
            self._by_client[job.client] = deque()
            self._turns.append(job.client)
        queue = self._by_client[job.client]
        (queue.appendleft if at_front else queue.append)(job)
        self.size, job.is_queued = self.size + 1, True

    def pop(self, can_start: Callable[[Job], bool]) -> Answer | None:
        """The next answer of the next client whose first job can start. A job whose prompt is not prefilled leaves the
        queue with its first answer: the others wait for the prompt."""
        for _ in range(min(MAX_CLIENTS_TRIED, len(self._turns))):
            client = self._turns[0]
            self._turns.rotate(-1)
            queue = self._by_client[client]
            if not queue:
                self._turns.remove(client)
                del self._by_client[client]
            elif can_start(job := queue[0]):
                answer = job.waiting.popleft()
                if not job.waiting or not job.is_prefilled:
                    self.remove(job)
                return answer
        return None

    def remove(self, job: Job) -> None:
        """Does nothing if it is not queued."""
        if job.is_queued:
            self._by_client[job.client].remove(job)
            self.size, job.is_queued = self.size - 1, False
