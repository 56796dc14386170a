"""Requests under way, and whose turn it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penjing.infer.requests import Request, Token, TokenMask

MOST_TRIED = 16  # clients that are asked in one step: of a thousand that all wait for the same, few


@dataclass(slots=True, eq=False)
class Answer:
    """An answer that waits or is under way."""

    job: Job
    number: int
    seed: int
    slot: int = -1  # none
    ids: list[int] = field(default_factory=list)  # after the prompt, of an answer that has lost its slot
    turns: list[int] = field(default_factory=list)  # where in the answer each turn begins, but the first
    grammar: TokenMask | None = None
    is_told: bool = False  # some event has told of it


@dataclass(slots=True, eq=False)
class Job:
    """A request that has not been answered in full. Its prompt is read once, by the first of its answers."""

    ticket: int
    request: Request
    prompt: NDArray[np.int32]
    adapter: int
    waiting: deque[Answer] = field(default_factory=deque)
    active: list[Answer] = field(default_factory=list)
    is_read: bool = False
    logits_1V: Tensor | None = None  # after the prompt, for answers that have not begun
    shared: int = 0  # tokens of the prompt that some slot held already
    scores: list[Token] = field(default_factory=list)  # of the prompt, where asked for
    is_queued: bool = False
    is_over: bool = False

    @property
    def client(self) -> str:
        return self.request.client


class JobQueue:
    """Jobs with answers that wait, first come first served for each client; clients take turns."""

    def __init__(self) -> None:
        self.size = 0
        self._of: dict[str, deque[Job]] = {}
        self._turns: deque[str] = deque()

    def add(self, job: Job, *, first: bool = False) -> None:
        """first: before the client's others."""
        if job.is_queued:
            return
        if job.client not in self._of:
            self._of[job.client] = deque()
            self._turns.append(job.client)
        queue = self._of[job.client]
        (queue.appendleft if first else queue.append)(job)
        self.size, job.is_queued = self.size + 1, True

    def take(self, may_begin: Callable[[Job], bool]) -> Answer | None:
        """The next answer of the client whose turn it is; of those whose first job may not begin yet the next client's.

        A job whose prompt has not been read leaves the queue with its first answer: the others wait for the prompt.
        """
        for _ in range(min(MOST_TRIED, len(self._turns))):
            client = self._turns[0]
            self._turns.rotate(-1)
            queue = self._of[client]
            if not queue:
                self._turns.remove(client)
                del self._of[client]
            elif may_begin(job := queue[0]):
                answer = job.waiting.popleft()
                if not job.waiting or not job.is_read:
                    self.remove(job)
                return answer
        return None

    def remove(self, job: Job) -> None:
        """Does nothing where it is not there."""
        if job.is_queued:
            self._of[job.client].remove(job)
            self.size, job.is_queued = self.size - 1, False
