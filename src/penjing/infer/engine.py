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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.infer.forward import Forward, Ints, ints
from penjing.infer.penalties import Penalties
from penjing.infer.requests import (
    MOST_TOP_LOGPROBS,
    Ended,
    Event,
    InjectedTokens,
    Request,
    Token,
    TokenMask,
    Turn,
    bits,
)
from penjing.infer.sample import Rows, draw, top_scores
from penjing.infer.slots import Slots
from penjing.kernels.memory_errors import is_out_of_memory

SHORTEST_PREFIX = 16  # tokens: fewer are read again sooner than found and copied


class TooManyWaiting(UserError):
    """The queue is full: try again later."""


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer that waits or is under way."""

    job: _Job
    number: int
    seed: int
    ids: list[int] = field(default_factory=list)  # after the prompt, of an answer that has lost its slot
    turns: list[int] = field(default_factory=list)  # where in the answer each turn begins, but the first
    grammar: TokenMask | None = None
    slot: int = -1
    has_begun: bool = False  # some event has told of it


@dataclass(slots=True, eq=False)
class _Job:
    """A request that has not been answered in full."""

    ticket: int
    request: Request
    prompt: Ints
    adapter: int
    waiting: deque[_Answer]
    active: list[_Answer] = field(default_factory=list)
    logits_1V: Tensor | None = None  # after the prompt, for answers that have not begun
    shared: int = 0  # tokens of the prompt that some slot held already
    is_read: bool = False  # by one answer for all
    scores: list[Token] = field(default_factory=list)  # of the prompt, where asked for
    is_over: bool = False


class _Pass(NamedTuple):
    """What one pass reads: rows in the order of slots, and which slots' tokens are all known to the model after it."""

    slot_B: Ints
    count_B: Ints  # rows of each
    slot_N: Ints
    position_N: Ints
    at_R: Ints  # rows whose logits are wanted
    complete_B: np.ndarray  # the next token can be drawn


class Engine:
    """Answers requests. `submit` and `cancel` may be called from any thread, all else from one.

    prefill_chunk: tokens of prompts read in one step. recover: where a pass runs out of memory, fewer are answered at
    once; without it the error is raised.
    """

    def __init__(
        self, forward: Forward, *, prefill_chunk: int = 256, max_waiting: int = 1_000_000, recover: bool = True
    ) -> None:
        self.forward, self.prefill_chunk, self.max_waiting, self.recover = forward, prefill_chunk, max_waiting, recover
        self.capacity = forward.num_slots  # slots in use: fewer after a pass ran out of memory
        self.max_tokens = forward.max_tokens
        self.tokens_read = self.tokens_shared = self.tokens_written = self.steps = 0
        self._slots = Slots(forward.num_slots, forward.max_tokens)
        self._answers: list[_Answer | None] = [None] * forward.num_slots
        self._rows = Rows.empty(forward.num_slots)
        self._penalties = Penalties(forward.num_slots, forward.vocab_size, forward.device)
        self._tickets = itertools.count()
        self._incoming: deque[_Job] = deque()
        self._cancelled: deque[int] = deque()
        self._jobs: dict[int, _Job] = {}
        self._queues: dict[str, deque[_Job]] = {}
        self._clients: deque[str] = deque()  # whose turn it is
        self._events: list[Event] = []

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its ticket. Raises UserError where it cannot be answered."""
        self.check(request)
        if self.num_waiting >= self.max_waiting:
            raise TooManyWaiting("too many requests are waiting", got=self.num_waiting, next_step="Try again later.")
        adapter = self._adapter(request.adapter)
        prompt = np.asarray(request.prompt, dtype=np.int32)
        job = _Job(next(self._tickets), request, prompt, adapter, deque())
        job.waiting.extend(_Answer(job, number, seed) for number, seed in enumerate(request.seeds))
        self._incoming.append(job)
        return job.ticket

    def check(self, request: Request) -> None:
        """Raises UserError for a request that cannot be answered."""
        tokens, room = len(request.prompt), self.max_tokens + (request.max_new_tokens < 1)
        if not tokens:
            raise UserError("nothing to go on from", where="prompt", wanted="at least one token")
        if tokens >= room:
            raise UserError("too long", where="prompt", got=f"{tokens} tokens", wanted=f"under {room}")
        for where, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
            if ids and not 0 <= min(ids) <= max(ids) < self.forward.vocab_size:
                wrong = next(index for index in ids if not 0 <= index < self.forward.vocab_size)
                raise UserError("no such token", where=where, got=wrong, wanted=f"0..{self.forward.vocab_size - 1}")
        if not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
            raise UserError(
                "out of range", where="top_logprobs", got=request.top_logprobs, wanted=f"0..{MOST_TOP_LOGPROBS}"
            )
        if not request.score_temperature > 0:
            raise UserError("out of range", where="score_temperature", got=request.score_temperature, wanted="> 0")
        self._adapter(request.adapter)

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
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._incoming or self._jobs or self._events or self._cancelled)

    @property
    def num_waiting(self) -> int:
        """Requests of which no answer has begun."""
        return len(self._incoming) + sum(map(len, self._queues.values()))

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
            self._draw(ints([answer.slot for answer in begun]), torch.cat([_logits_of(answer) for answer in begun]))
            self._forget_logits()
        if planned := self._plan():
            try:
                logits_RV = self.forward(*self._arrays(planned))
            except Exception as error:
                if not (self.recover and is_out_of_memory(error)):
                    raise
                self._shrink(error)
            else:
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
            self._enqueue(job)
        while self._cancelled:
            if job_or_none := self._jobs.get(self._cancelled.popleft()):
                self._end_job(job_or_none, "cancelled")

    def _enqueue(self, job: _Job, *, first: bool = False) -> None:
        client = job.request.client
        if client not in self._queues:
            self._queues[client] = deque()
            self._clients.append(client)
        if first:
            self._queues[client].appendleft(job)
        else:
            self._queues[client].append(job)

    # --- who gets a slot ---------------------------------------------------------------------------------------------

    def _admit(self) -> list[_Answer]:
        """Give free slots to waiting answers; returns those whose first token can be drawn at once."""
        begun = []
        backlog = self._backlog()
        while (slot := self._slots.oldest(self.capacity)) >= 0:
            job = self._next_job(backlog)
            if job is None:
                break
            answer = job.waiting.popleft()
            is_ready = self._begin(answer, slot)
            if job.is_over:  # its grammar could not be made
                continue
            if is_ready:
                begun.append(answer)
            else:
                backlog[job.request.client] = backlog.get(job.request.client, 0) + self._slots.pending(answer.slot)
        return begun

    def _backlog(self) -> dict[str, int]:
        """Tokens of prompts that each client has in slots and that are still to be read."""
        found: dict[str, int] = {}
        for slot in np.flatnonzero(self._slots.is_active_S).tolist():
            pending = self._slots.pending(slot)
            if pending > 1:
                client = self._at(slot).job.request.client
                found[client] = found.get(client, 0) + pending
        return found

    def _next_job(self, backlog: dict[str, int]) -> _Job | None:
        """The job whose client's turn it is and of which an answer can begin; taken from its queue."""
        for _ in range(len(self._clients)):
            client = self._clients[0]
            self._clients.rotate(-1)
            queue = self._queues[client]
            while queue and queue[0].is_over:
                queue.popleft()
            if not queue:
                self._clients.remove(client)
                del self._queues[client]
                continue
            job = queue[0]
            if not self._may_begin(job, backlog):
                continue
            # A prompt is read once for all its answers: they wait outside of the queue until then.
            if len(job.waiting) == 1 or not job.is_read:
                queue.popleft()
            return job
        return None

    def _may_begin(self, job: _Job, backlog: dict[str, int]) -> bool:
        """Whether it is worth a slot now: not where more prompts are under way than a step reads, nor where a slot is
        just reading what this prompt begins with."""
        if job.is_read:
            return True
        if backlog.get(job.request.client) and sum(backlog.values()) >= self.prefill_chunk:
            return False
        if job.request.prompt_logprobs:
            return True
        now, soon = self._slots.prefix(job.prompt, job.adapter)
        length = len(job.prompt)
        return self._sharable(soon.tokens, length) < self._sharable(now.tokens, length) + SHORTEST_PREFIX

    def _begin(self, answer: _Answer, slot: int) -> bool:
        """Put an answer into a slot, with what others have read of its tokens; whether its next token can be drawn."""
        job, slots = answer.job, self._slots
        ids = np.concatenate([job.prompt, np.asarray(answer.ids, np.int32)]) if answer.ids else job.prompt
        now, _ = slots.prefix(ids, job.adapter)
        is_ready = job.logits_1V is not None and not answer.ids and now.tokens == len(ids)
        shared = now.tokens if is_ready else self._sharable(now.tokens, len(ids))
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
        return is_ready

    def _sharable(self, tokens: int, length: int) -> int:
        """Of so many tokens that a slot has in common with a sequence, how many are taken over: the last one is read,
        for what comes after it. Where values depend on how a prompt was cut into chunks, whole chunks only."""
        tokens = min(tokens, length - 1)
        if not self.forward.exact:
            tokens -= tokens % self.prefill_chunk
        return tokens if tokens >= SHORTEST_PREFIX else 0

    def _put(self, answer: _Answer, slot: int) -> None:
        """The answer's own settings, by slot."""
        job, slots = answer.job, self._slots
        request, said = job.request, len(answer.ids)
        limit = min(request.max_new_tokens, self.max_tokens - len(job.prompt))
        answer.slot, self._answers[slot] = slot, answer
        if answer not in job.active:
            job.active.append(answer)
        slots.written_S[slot], slots.limit_S[slot] = said, limit
        slots.set_stop(slot, request.stop)
        if not request.sampling.is_greedy:
            generator = np.random.Generator(np.random.PCG64(answer.seed))
            slots.uniform_ST[slot, :limit] = generator.random(limit, dtype=np.float32)
        self._rows.put(slot, request.sampling, request.score_temperature)
        self._penalties.put(slot, request.sampling, job.prompt, answer.ids)
        if request.grammar is not None and answer.grammar is None:
            answer.grammar = self._own(answer, request.grammar)

    # --- what a pass reads -------------------------------------------------------------------------------------------

    def _plan(self) -> _Pass | None:
        """The last token of every answer that is being written, and a chunk of the others' tokens."""
        slots = self._slots
        active_A = np.flatnonzero(slots.is_active_S)
        if not len(active_A):
            return None
        pending_A = slots.known_S[active_A] - slots.length_S[active_A]
        slot_B, count_B = active_A[pending_A == 1], pending_A[pending_A == 1]
        if len(slot_B) < len(active_A):
            chunks = list(self._chunks(active_A[pending_A > 1].tolist()))
            slot_B = np.concatenate([slot_B, ints([slot for slot, _ in chunks])])
            count_B = np.concatenate([count_B, ints([count for _, count in chunks])])
        first_B = slots.length_S[slot_B]
        complete_B = first_B + count_B == slots.known_S[slot_B]
        end_B = count_B.cumsum()
        slot_N = slot_B.repeat(count_B)
        position_N = (first_B - end_B + count_B).repeat(count_B) + np.arange(len(slot_N))
        is_wanted_N = np.zeros(len(slot_N), dtype=bool)
        is_wanted_N[end_B[complete_B] - 1] = True
        for slot, end, count in zip(slot_B.tolist(), end_B.tolist(), count_B.tolist(), strict=True):
            if count > 1 and self._scores_prompt(slot):
                is_wanted_N[end - count : end] = True
        return _Pass(slot_B, count_B, slot_N, position_N, np.flatnonzero(is_wanted_N), complete_B)

    def _chunks(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        """(slot, tokens) of what is read beside the answers, at most `prefill_chunk` tokens; clients take turns."""
        by_client: dict[str, list[int]] = {}
        for slot in sorted(slots, key=lambda slot: self._at(slot).job.ticket):
            by_client.setdefault(self._at(slot).job.request.client, []).append(slot)
        clients = sorted(by_client)
        turn = self.steps % len(clients)
        left = self.prefill_chunk
        for number, client in enumerate(clients[turn:] + clients[:turn]):
            share = -(-left // (len(clients) - number))
            for slot in by_client[client]:
                if share <= 0:
                    break
                count = self._slots.pending(slot)
                if self.forward.exact:
                    count = min(count, share)
                else:  # a chunk ends where it always does, whoever else reads
                    count = min(count, self.prefill_chunk - int(self._slots.length_S[slot]) % self.prefill_chunk)
                share, left = share - count, left - count
                yield slot, count
            if left <= 0:
                return

    def _arrays(self, planned: _Pass) -> tuple[Ints, Ints, Ints, Ints, Ints | None]:
        slots = self._slots
        adapter_N = slots.adapter_S[planned.slot_N] if self.forward.adapters else None
        id_N = slots.token_ST[planned.slot_N, planned.position_N].astype(np.int64)
        return planned.slot_N, planned.position_N, id_N, planned.at_R, adapter_N

    def _scores_prompt(self, slot: int) -> bool:
        job = self._at(slot).job
        return job.request.prompt_logprobs and not job.is_read

    def _have_read(self, planned: _Pass, logits_RV: Tensor) -> None:
        """Take down what the pass read, and draw the next token where all is read."""
        slots = self._slots
        slots.length_S[planned.slot_B] += planned.count_B
        is_given_B = (planned.count_B > 1) | (slots.written_S[planned.slot_B] == 0)  # and not drawn
        self.tokens_read += int(planned.count_B[is_given_B].sum())
        last_B = planned.count_B.cumsum() - 1
        row_B = np.searchsorted(planned.at_R, last_B[planned.complete_B])
        slot_B = planned.slot_B[planned.complete_B]
        going = []
        for place, slot in enumerate(slot_B.tolist()):
            job = self._at(slot).job
            if not job.is_read and slots.length_S[slot] == len(job.prompt):
                self._prompt_is_read(job, slot, planned, logits_RV, int(row_B[place]))
                if job.is_over:
                    continue
            going.append(place)
        self._score_partial_prompts(planned, logits_RV)
        if not going:
            return
        if len(going) < len(slot_B):
            slot_B, row_B = slot_B[going], row_B[going]
        if len(row_B) < len(logits_RV):
            logits_RV = logits_RV[torch.from_numpy(row_B).to(logits_RV.device)]
        self._draw(slot_B, logits_RV)

    def _prompt_is_read(self, job: _Job, slot: int, planned: _Pass, logits_RV: Tensor, row: int) -> None:
        job.is_read = True
        if job.request.prompt_logprobs:
            self._score_prompt(job, slot, planned, logits_RV)
        if job.request.max_new_tokens < 1:
            self._end_job(job, "length")
            return
        if job.waiting:
            job.logits_1V = logits_RV[row : row + 1].clone()
            self._enqueue(job, first=True)

    def _score_partial_prompts(self, planned: _Pass, logits_RV: Tensor) -> None:
        for slot, count, complete in zip(
            planned.slot_B.tolist(), planned.count_B.tolist(), planned.complete_B.tolist(), strict=True
        ):
            if count > 1 and not complete and self._scores_prompt(slot):
                self._score_prompt(self._at(slot).job, slot, planned, logits_RV)

    def _score_prompt(self, job: _Job, slot: int, planned: _Pass, logits_RV: Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow those of this pass."""
        if not job.scores:
            job.scores.append(Token(int(job.prompt[0]), float("nan"), float("nan")))
        place = int(np.flatnonzero(planned.slot_B == slot)[0])
        end = int(planned.count_B[: place + 1].sum())
        count = int(planned.count_B[place])
        rows = np.searchsorted(planned.at_R, np.arange(end - count, end))
        first = int(planned.position_N[end - count]) + 1
        following = job.prompt[first : first + count]
        if not len(following):
            return
        some_NV = logits_RV[torch.from_numpy(rows[: len(following)]).to(logits_RV.device)]
        temperature_N = np.full(len(following), job.request.score_temperature, np.float32)
        id_N = torch.from_numpy(following.astype(np.int64)).to(logits_RV.device)
        scored = some_NV if job.request.score_temperature == 1 else some_NV / job.request.score_temperature
        logp_N = scored.gather(1, id_N[:, None])[:, 0] - scored.logsumexp(dim=-1)
        tops = _tops(some_NV, temperature_N, [job.request.top_logprobs] * len(following))
        for index, logp, top in zip(following.tolist(), logp_N.tolist(), tops, strict=True):
            job.scores.append(Token(index, logp, 0.0, top))

    # --- what is drawn -----------------------------------------------------------------------------------------------

    def _draw(self, slot_R: Ints, logits_RV: Tensor) -> None:
        """One token for each of these slots."""
        slots, rows = self._slots, self._rows.take(slot_R)
        masks = self._masks(slot_R)
        changed = self._penalties.changed(logits_RV, slot_R, masks)
        at_R = slots.written_S[slot_R]
        drawn = draw(logits_RV, slots.uniform_ST[slot_R, at_R], rows, changed)
        self._penalties.said(slot_R, drawn.id_R)
        answers = [self._answers[slot] for slot in slot_R.tolist()]  # None: its grammar failed just now
        wanted = [0 if answer is None else answer.job.request.top_logprobs for answer in answers]
        tops = _tops(logits_RV, rows.score_temperature_R, wanted)
        # One transfer, and so one wait for the device: ids below 2^24 are whole in float32.
        told_3R = torch.stack([drawn.id_R.float(), drawn.logp_R, drawn.drawn_logp_R]).cpu().numpy()
        id_R = told_3R[0].astype(np.int64)
        slots.token_ST[slot_R, slots.known_S[slot_R]] = id_R
        slots.known_S[slot_R] += 1
        slots.written_S[slot_R] += 1
        self.tokens_written += len(slot_R)
        has_stopped_R = (slots.stop_SE[slot_R] == id_R[:, None]).any(axis=1)
        is_full_R = slots.written_S[slot_R] >= slots.limit_S[slot_R]
        stopped = []
        for slot, index, logp, drawn_logp, top, has_stopped, is_full in zip(
            slot_R.tolist(), id_R.tolist(), told_3R[1].tolist(), told_3R[2].tolist(), tops,
            has_stopped_R.tolist(), is_full_R.tolist(), strict=True,
        ):  # fmt: skip
            answer = self._answers[slot]
            if answer is None:  # ended by an error of its own code
                continue
            token = Token(index, logp, drawn_logp, top)
            if has_stopped and answer.job.request.follow is not None:
                stopped.append((answer, token))
                continue
            self._said(answer, token, "stop" if has_stopped else "length" if is_full else "")
        if stopped:
            self._follow(stopped)

    def _said(self, answer: _Answer, token: Token, ended: Ended) -> None:
        """An answer's new token; its own code may end it."""
        request = answer.job.request
        watch = request.watch
        if watch is not None and self._own(answer, lambda: watch(answer.number, token.id)):
            ended = "stop"
        if answer.grammar is not None and ended != "stop":
            grammar = answer.grammar
            self._own(answer, lambda: grammar.accept(token.id))
            if not answer.job.is_over and grammar.finished:
                ended = "stop"
        if answer.job.is_over:
            return
        self._tell(answer, token, ended)
        if ended:
            self._end(answer)

    def _masks(self, slot_R: Ints) -> dict[int, np.ndarray]:
        """By row, which ids a grammar allows."""
        masks = {}
        for row, slot in enumerate(slot_R.tolist()):
            answer = self._answers[slot]
            if answer is not None and answer.grammar is not None:
                allowed = self._own(answer, answer.grammar.allowed)
                if allowed is not None:
                    masks[row] = bits(allowed, self.forward.vocab_size)
        return masks

    def _follow(self, stopped: list[tuple[_Answer, Token]]) -> None:
        """Let those go on whose turn something follows; one call for all that ask the same function."""
        while stopped:
            follow = stopped[0][0].job.request.follow
            mine = [pair for pair in stopped if pair[0].job.request.follow is follow]
            stopped = [pair for pair in stopped if pair[0].job.request.follow is not follow]
            try:
                assert follow is not None
                given = follow([self._turn(answer) for answer, _ in mine])
            except Exception as error:  # the caller's own code: nobody else is to suffer
                for answer, _ in mine:
                    self._end_job(answer.job, "error", error)
                continue
            for (answer, token), following in zip(mine, given, strict=True):
                self._go_on(answer, token, following)

    def _turn(self, answer: _Answer) -> Turn:
        start = answer.turns[-1] if answer.turns else 0
        ids = self._slots.said(answer.slot, len(answer.job.prompt))
        return Turn(answer.job.ticket, answer.number, len(answer.turns) + 1, ids[start:])

    def _go_on(self, answer: _Answer, token: Token, given: InjectedTokens | None) -> None:
        slots, slot = self._slots, answer.slot
        if given is None or slots.written_S[slot] + len(given.ids) >= slots.limit_S[slot]:
            self._tell(answer, token, "stop" if given is None else "length")
            self._end(answer)
            return
        slots.append(slot, given.ids)
        answer.turns.append(int(slots.written_S[slot]))
        self._tell(answer, token, "", given)

    def _tell(self, answer: _Answer, token: Token | None, ended: Ended, given: InjectedTokens | None = None) -> None:
        job = answer.job
        prompt, shared = None, 0
        if not answer.has_begun:
            answer.has_begun = True
            shared = job.shared if answer.number == 0 else len(job.prompt)
            prompt = tuple(job.scores) if job.scores and answer.number == 0 else None
        self._events.append(Event(job.ticket, answer.number, token, ended, prompt, shared, given))

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end(self, answer: _Answer) -> None:
        """Free the slot; what it holds stays for prompts that begin alike."""
        self._free(answer)
        job = answer.job
        job.active.remove(answer)
        if not job.active and not job.waiting:
            job.is_over = True
            self._jobs.pop(job.ticket, None)

    def _free(self, answer: _Answer) -> None:
        if answer.slot >= 0:
            self._slots.release(answer.slot, self.steps)
            self._answers[answer.slot], answer.slot = None, -1

    def _end_job(self, job: _Job, ended: Ended, error: Exception | None = None) -> None:
        """End all answers of a request that have not ended."""
        if job.is_over:
            return
        job.is_over = True
        self._jobs.pop(job.ticket, None)
        job.logits_1V = None
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
        active = [answer for answer in self._answers if answer is not None]
        active.sort(key=lambda answer: (answer.job.ticket, answer.number))
        if len(active) == 1:
            self._end_job(active[0].job, "error", error)
            return
        self.capacity = len(active) // 2
        for answer in reversed(active[self.capacity :]):
            job = answer.job
            answer.ids = self._slots.said(answer.slot, len(job.prompt))
            self._free(answer)
            job.active.remove(answer)
            job.waiting.appendleft(answer)
            if job not in self._queues.get(job.request.client, ()):
                self._enqueue(job, first=True)

    def _own(self, answer: _Answer, work: Callable[[], object]) -> object:
        """A request's own code: an error in it ends the request."""
        try:
            return work()
        except Exception as error:  # whatever it is, nobody else is to suffer
            self._end_job(answer.job, "error", error)
            return None

    def _forget_logits(self) -> None:
        for job in self._jobs.values():
            if job.logits_1V is not None and not job.waiting:
                job.logits_1V = None

    def _at(self, slot: int) -> _Answer:
        answer = self._answers[slot]
        assert answer is not None
        return answer


def _logits_of(answer: _Answer) -> Tensor:
    assert answer.job.logits_1V is not None
    return answer.job.logits_1V


def _tops(logits_RV: Tensor, temperature_R: np.ndarray, wanted: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """Each row's likeliest ids with their log-probabilities."""
    most = max(wanted, default=0)
    if not most:
        return [()] * len(wanted)
    logp_RK, id_RK = top_scores(logits_RV, temperature_R, most)
    logp, ids = logp_RK.tolist(), id_RK.tolist()
    return [tuple(zip(ids[row][:count], logp[row][:count], strict=True)) for row, count in enumerate(wanted)]
