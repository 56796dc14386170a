"""The engine: many requests answered at once by one model, a token for each of them in every step.

Continuous batching (Orca, OSDI 2022): a step is one pass of the model over the last token of every answer under way
and, beside them, a chunk of the prompts that are still being read (chunked prefill, arXiv:2308.16369); where an answer
ends, the next takes its slot in the following step. For the engine there is no difference between the two: an answer
has tokens that are known and tokens whose keys and values are in its slot, a pass reads some of those that are not, and
where none is left, the next token is drawn.

A slot keeps its keys and values when its answer has ended. A new prompt takes over the longest beginning that any slot
holds (a system prompt, or the conversation so far) and reads only the rest; the slot used longest ago is overwritten
first. Clients take turns for slots and for the reading of prompts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.base.errors import UserError
from penjing.infer.capacity import Capacity
from penjing.infer.forward import Forward, Ints, ints
from penjing.infer.jobs import Answer, Job, JobQueue
from penjing.infer.requests import (
    Ended,
    Event,
    InjectedTokens,
    Request,
    Token,
    TokenMask,
    Turn,
    bits,
    check_request,
)
from penjing.infer.sampler import Sampler, score
from penjing.infer.scheduler import Pass, Scheduler
from penjing.infer.slots import Slots
from penjing.kernels.memory_errors import is_out_of_memory

Result = TypeVar("Result")


class Engine:
    """Answers requests. `submit` and `cancel` may be called from any thread, all else from one.

    prefill_chunk: tokens of prompts read in one step. recover: where a pass runs out of memory, fewer are answered at
    once for a while; without it the error is raised.
    """

    def __init__(self, forward: Forward, *, prefill_chunk: int = 256, recover: bool = True) -> None:
        self.forward, self.recover = forward, recover
        self.max_tokens = forward.max_tokens
        self.tokens_read = self.tokens_shared = self.tokens_written = self.steps = 0
        self._capacity = Capacity(forward.num_slots)
        self._slots = Slots(forward.num_slots, forward.max_tokens)
        self._sampler = Sampler(forward.num_slots, forward.max_tokens, forward.vocab_size, forward.device)
        self._tickets = itertools.count()
        self._incoming: deque[Job] = deque()
        self._cancelled: deque[int] = deque()
        self._jobs: dict[int, Job] = {}
        self._queue = JobQueue()
        self._scheduler = Scheduler(self._slots, self._queue, exact=forward.exact, prefill_chunk=prefill_chunk)
        self._events: list[Event] = []

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its ticket. Raises UserError where it cannot be answered."""
        check_request(request, self.max_tokens, self.forward.vocab_size)
        adapter = self._adapter(request.adapter)
        prompt = np.asarray(request.prompt, dtype=np.int32)
        job = Job(next(self._tickets), request, prompt, adapter)
        job.waiting.extend(Answer(job, number, seed) for number, seed in enumerate(request.seeds))
        self._incoming.append(job)
        return job.ticket

    def _adapter(self, name: str | None) -> int:
        if name is None:
            return self.forward.active
        if name == "":
            return -1
        if name not in self.forward.adapters:
            raise UserError(
                f"no adapter is called {name!r}", where="adapter", wanted=", ".join(self.forward.adapters) or "none"
            )
        return self.forward.adapters.index(name)

    def cancel(self, ticket: int) -> None:
        """End a request; its slots are free for the next step. Does nothing where it has ended."""
        self._cancelled.append(ticket)

    def cancel_all(self) -> None:
        """End every request there is now."""
        self._cancelled.extend([job.ticket for job in [*self._jobs.values(), *self._incoming]])

    def close(self) -> None:
        self.forward.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """Slots in use."""
        return self._capacity.slots

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._incoming or self._jobs or self._events or self._cancelled)

    @property
    def num_waiting(self) -> int:
        """Requests of which an answer waits for a slot."""
        return len(self._incoming) + self._queue.size

    @property
    def num_active(self) -> int:
        """Answers that have a slot."""
        return int(self._slots.is_active_S.sum())

    # --- a step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One pass of the model and a token of each answer whose tokens are all read; returns what happened."""
        self.steps += 1
        self._take_in()
        if begun := self._admit():
            logits_RV = torch.cat([_logits_of(answer) for answer in begun])
            self._draw(ints([answer.slot for answer in begun]), logits_RV)
            for answer in begun:
                if not answer.job.waiting:
                    answer.job.logits_1V = None
        if planned := self._scheduler.plan():
            try:
                logits_RV = self.forward(*self._arrays(planned))
            except Exception as error:
                if not (self.recover and is_out_of_memory(error)):
                    raise
                self._shrink(error)
            else:
                self._capacity.went_well()
                self._have_read(planned, logits_RV)
        events, self._events = self._events, []
        return events

    def _take_in(self) -> None:
        while self._incoming:
            job = self._incoming.popleft()
            self._jobs[job.ticket] = job
            if not job.waiting:
                self._end_job(job, "length")
                continue
            self._queue.add(job)
        while self._cancelled:
            if cancelled := self._jobs.get(self._cancelled.popleft()):
                self._end_job(cancelled, "cancelled")

    # --- who gets a slot ---------------------------------------------------------------------------------------------

    def _admit(self) -> list[Answer]:
        """Give free slots to waiting answers; returns those whose first token can be drawn at once."""
        begun = []
        while (slot := self._slots.oldest(self.capacity)) >= 0 and (answer := self._scheduler.next_answer()):
            if self._begin(answer, slot):
                begun.append(answer)
        return begun

    def _begin(self, answer: Answer, slot: int) -> bool:
        """Put an answer into a slot, with what others have read of its tokens; whether its next token can be drawn."""
        job, slots = answer.job, self._slots
        ids = np.concatenate([job.prompt, np.asarray(answer.ids, np.int32)]) if answer.ids else job.prompt
        now, _ = slots.prefix(ids, job.adapter)
        is_ready = job.logits_1V is not None and not answer.ids and now.tokens == len(ids)
        shared = now.tokens if is_ready else self._scheduler.sharable(now.tokens, len(ids))
        if job.request.prompt_logprobs and not job.is_read:
            shared = 0
        if shared and slots.may_go_on_in(now.slot, shared):
            slot = now.slot
        elif shared:
            self.forward.copy_prefix(now.slot, slot, shared)
        slots.take(slot, ids, shared, job.adapter)
        self._put(answer, slot)
        if not answer.ids:
            job.shared = shared if not job.is_read else len(job.prompt)
        self.tokens_shared += shared
        return is_ready and answer.slot >= 0  # where its grammar could be made

    def _put(self, answer: Answer, slot: int) -> None:
        """The answer's own settings, by slot."""
        job, slots = answer.job, self._slots
        request, said = job.request, len(answer.ids)
        limit = min(request.max_new_tokens, self.max_tokens - len(job.prompt))
        answer.slot, slots.answers[slot] = slot, answer
        if answer not in job.active:
            job.active.append(answer)
        slots.written_S[slot], slots.limit_S[slot] = said, limit
        slots.is_scored_S[slot] = request.prompt_logprobs and not job.is_read
        slots.set_stop(slot, request.stop)
        self._sampler.put(slot, request, answer.seed, limit, answer.ids)
        if request.grammar is not None and answer.grammar is None:
            answer.grammar = self._own(answer, request.grammar)

    def _arrays(self, planned: Pass) -> tuple[Ints, Ints, Ints, Ints, Ints | None]:
        slots = self._slots
        adapter_N = slots.adapter_S[planned.slot_N] if self.forward.adapters else None
        id_N = slots.token_ST[planned.slot_N, planned.position_N].astype(np.int64)
        return planned.slot_N, planned.position_N, id_N, planned.at_R, adapter_N

    def _have_read(self, planned: Pass, logits_RV: Tensor) -> None:
        """Take down what the pass read, and draw the next token where all is read."""
        slots = self._slots
        slots.length_S[planned.slot_B] += planned.count_B
        is_given_B = (planned.count_B > 1) | (slots.written_S[planned.slot_B] == 0)  # and not drawn
        self.tokens_read += int(planned.count_B[is_given_B].sum())
        for place in np.flatnonzero(slots.is_scored_S[planned.slot_B]).tolist():
            self._score_prompt(place, planned, logits_RV)
        slot_R, row_R = planned.slot_B[planned.complete_B], planned.row_of_last_B[planned.complete_B]
        for place in np.flatnonzero(slots.written_S[slot_R] == 0).tolist():
            job = slots.at(int(slot_R[place])).job
            if not job.is_read:
                self._prompt_is_read(job, logits_RV[row_R[place]])
        if not (going_R := slots.is_active_S[slot_R]).all():  # requests that wanted no more than that
            slot_R, row_R = slot_R[going_R], row_R[going_R]
        if len(row_R) < len(logits_RV):
            logits_RV = logits_RV[torch.from_numpy(row_R).to(logits_RV.device)]
        if len(slot_R):
            self._draw(slot_R, logits_RV)

    def _prompt_is_read(self, job: Job, logits_V: Tensor) -> None:
        job.is_read = True
        if job.request.max_new_tokens < 1:
            self._end_job(job, "length")
            return
        if job.waiting:
            job.logits_1V = logits_V[None].clone()
            self._queue.add(job, first=True)

    def _score_prompt(self, place: int, planned: Pass, logits_RV: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow those of this pass."""
        slot, count = int(planned.slot_B[place]), int(planned.count_B[place])
        job, end = self._slots.at(slot).job, int(self._slots.length_S[slot])
        if not job.scores:
            job.scores.append(Token(int(job.prompt[0]), float("nan")))
        if self._slots.length_S[slot] == len(job.prompt):
            self._slots.is_scored_S[slot] = False
        following = job.prompt[end - count + 1 : end + 1]
        if not len(following):
            return
        # All rows of the chunk were asked for; after the prompt's last token nothing is known.
        first = int(planned.row_of_last_B[place]) - count + 1
        job.scores += score(logits_RV[first : first + len(following)], following, job.request)

    # --- what is drawn -----------------------------------------------------------------------------------------------

    def _draw(self, slot_R: Ints, logits_RV: Tensor) -> None:
        """One token for each of these slots."""
        slots = self._slots
        drawn = self._sampler.draw(slot_R, slots.written_S[slot_R], logits_RV, self._masks(slot_R))
        answers, id_R = [slots.answers[slot] for slot in slot_R.tolist()], drawn.id_R
        slots.token_ST[slot_R, slots.known_S[slot_R]] = id_R
        slots.known_S[slot_R] += 1
        slots.written_S[slot_R] += 1
        self.tokens_written += len(slot_R)
        has_stopped_R = (slots.stop_SE[slot_R] == id_R[:, None]).any(axis=1)
        is_full_R = slots.written_S[slot_R] >= slots.limit_S[slot_R]
        stopped = []
        tokens = map(Token, id_R.tolist(), drawn.logp_R.tolist(), drawn.drawn_logp_R.tolist(), drawn.tops)
        for answer, token, has_stopped, is_full in zip(
            answers, tokens, has_stopped_R.tolist(), is_full_R.tolist(), strict=True
        ):
            if answer is None or answer.slot < 0:  # ended by an error of its own code
                continue
            if has_stopped and answer.job.request.follow is not None:
                stopped.append((answer, token))
                continue
            self._said(answer, token, "stop" if has_stopped else "length" if is_full else "")
        if stopped:
            self._follow(stopped)

    def _said(self, answer: Answer, token: Token, ended: Ended) -> None:
        """An answer's new token; its own code may end it."""
        request = answer.job.request
        watch = request.watch
        if watch is not None and self._own(answer, partial(watch, answer.number, token.id)):
            ended = "stop"
        grammar = answer.grammar
        if grammar is not None and ended != "stop" and self._own(answer, partial(_accepted, grammar, token.id)):
            ended = "stop"
        if answer.job.is_over:
            return
        self._tell(answer, token, ended)
        if ended:
            self._end(answer)

    def _masks(self, slot_R: Ints) -> dict[int, NDArray[np.bool_]]:
        """By row, which ids a grammar allows."""
        masks = {}
        for row, slot in enumerate(slot_R.tolist()):
            answer = self._slots.answers[slot]
            if answer is not None and answer.grammar is not None:
                may_V = self._own(answer, partial(_allowed, answer.grammar, self.forward.vocab_size))
                if may_V is not None:
                    masks[row] = may_V
        return masks

    def _follow(self, stopped: list[tuple[Answer, Token]]) -> None:
        """Let those go on whose turn something follows; one call for all that ask the same function."""
        while stopped:
            follow = stopped[0][0].job.request.follow
            mine = [pair for pair in stopped if pair[0].job.request.follow is follow]
            stopped = [pair for pair in stopped if pair[0].job.request.follow is not follow]
            try:
                assert follow is not None
                given = follow([self._turn(answer) for answer, _ in mine])
                self._check_given(given, len(mine))
            except Exception as error:  # the caller's own code: nobody else is to suffer
                for answer, _ in mine:
                    self._end_job(answer.job, "error", error)
                continue
            for (answer, token), following in zip(mine, given, strict=True):
                self._go_on(answer, token, following)

    def _check_given(self, given: Sequence[InjectedTokens | None], turns: int) -> None:
        if len(given) != turns:
            raise ValueError(f"{turns} turns ended, and {len(given)} were followed")
        for tokens in given:
            if tokens is not None and not all(0 <= index < self.forward.vocab_size for index in tokens.ids):
                raise ValueError("what follows a turn holds an id that is no token")

    def _turn(self, answer: Answer) -> Turn:
        start = answer.turns[-1] if answer.turns else 0
        ids = self._slots.said(answer.slot, len(answer.job.prompt))
        return Turn(answer.job.ticket, answer.number, len(answer.turns) + 1, ids[start:])

    def _go_on(self, answer: Answer, token: Token, given: InjectedTokens | None) -> None:
        slots, slot = self._slots, answer.slot
        if given is None or slots.written_S[slot] + len(given.ids) >= slots.limit_S[slot]:
            self._tell(answer, token, "stop" if given is None else "length")
            self._end(answer)
            return
        slots.append(slot, given.ids)
        answer.turns.append(int(slots.written_S[slot]))
        self._tell(answer, token, "", given)

    def _tell(self, answer: Answer, token: Token | None, ended: Ended, given: InjectedTokens | None = None) -> None:
        job = answer.job
        prompt, shared = None, 0
        if not answer.is_told:
            answer.is_told = True
            shared = job.shared if answer.number == 0 else len(job.prompt)
            prompt = tuple(job.scores) if job.scores and answer.number == 0 else None
        self._events.append(Event(job.ticket, answer.number, token, ended, prompt, shared, given))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, answer: Answer) -> None:
        """Free the slot; what it holds stays for prompts that begin alike."""
        self._free(answer)
        job = answer.job
        job.active.remove(answer)
        if not job.active and not job.waiting:
            job.is_over = True
            self._jobs.pop(job.ticket, None)

    def _free(self, answer: Answer) -> None:
        if answer.slot >= 0:
            self._slots.release(answer.slot, self.steps)
            answer.slot = -1

    def _end_job(self, job: Job, ended: Ended, error: Exception | None = None) -> None:
        """End all answers of a request that have not ended."""
        if job.is_over:
            return
        job.is_over = True
        self._jobs.pop(job.ticket, None)
        self._queue.remove(job)
        for answer in [*job.active, *job.waiting]:
            prompt = tuple(job.scores) if job.scores and answer.number == 0 else None
            self._events.append(Event(job.ticket, answer.number, None, ended, prompt, error=error))
            self._free(answer)
        job.active.clear()
        job.waiting.clear()

    def fail(self, error: Exception) -> list[Event]:
        """End every request with this error."""
        self._take_in()
        for job in list(self._jobs.values()):
            self._end_job(job, "error", error)
        events, self._events = self._events, []
        return events

    def _shrink(self, error: Exception) -> None:
        """After a pass ran out of memory: half as many answers at once, the newest wait and go on later."""
        active = [answer for answer in self._slots.answers if answer is not None]
        active.sort(key=lambda answer: (answer.job.ticket, answer.number))
        if len(active) == 1:
            self._end_job(active[0].job, "error", error)
            return
        self._capacity.ran_out(len(active))
        for answer in reversed(active[self.capacity :]):
            job = answer.job
            answer.ids = self._slots.said(answer.slot, len(job.prompt))
            job.scores = job.scores if job.is_read else []
            self._free(answer)
            job.active.remove(answer)
            job.waiting.appendleft(answer)
            self._queue.add(job, first=True)

    def _own(self, answer: Answer, work: Callable[[], Result]) -> Result | None:
        """What a request's own code returns: an error in it ends the request."""
        try:
            return work()
        except Exception as error:  # whatever it is, nobody else is to suffer
            self._end_job(answer.job, "error", error)
            return None


def _logits_of(answer: Answer) -> Tensor:
    assert answer.job.logits_1V is not None
    return answer.job.logits_1V


def _accepted(grammar: TokenMask, index: int) -> bool:
    grammar.accept(index)
    return grammar.finished


def _allowed(grammar: TokenMask, vocab_size: int) -> NDArray[np.bool_] | None:
    allowed = grammar.allowed()
    may_V = None if allowed is None else bits(allowed, vocab_size)
    if may_V is not None and not may_V.any():
        raise ValueError("the grammar allows no token")
    return may_V
