"""Ask a model what a task asks, through the inference engine, and add up the scores."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from penjing.base.errors import UserError
from penjing.data.chat.render import render
from penjing.data.chat.turn_parser import without_reasoning
from penjing.data.tokenizer.tokenizer import Tokenizer
from penjing.eval.task import Generate, LogLikelihood, Result, Task
from penjing.infer import requests as engine_requests
from penjing.infer.generate import generate, make_engine
from penjing.model.transformer import Transformer

MAX_THINKING_TOKENS = 192  # added to an answer's limit when thinking is on


@dataclass(frozen=True, slots=True)
class Graded:
    """A request, the model's answer, and its score from 0 to 1."""

    request: Any
    result: Result
    score: float

    @property
    def is_correct(self) -> bool:
        return self.score == 1

    @property
    def text(self) -> str:
        return self.result.text


def grade(
    task: Task,
    asked: Iterable[LogLikelihood | Generate],
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    thinking: bool | None = None,
    max_tokens: int = 0,
    batch_size: int = 64,
) -> list[Graded]:
    """The answers to these requests of `task`, each asked for itself.

    thinking: as in `render`; thoughts are not graded. max_tokens: limit of an answer with its thought; 0: that of the
    request, with thinking 192 more. batch_size: requests that are answered together. Raises UserError for a request
    that fills the context.
    """
    requests, results = list(asked), dict[int, Result]()
    by_limit: dict[int, list[int]] = defaultdict(list)  # indices of requests; 0: no answer is generated
    for index, request in enumerate(requests):
        limit = request.max_new_tokens if isinstance(request, Generate) else 0
        by_limit[limit and (max_tokens or limit + MAX_THINKING_TOKENS * bool(thinking))].append(index)
    for limit, indices in by_limit.items():
        batch: Any = [requests[index] for index in indices]
        found = (
            _answers(batch, model, tokenizer, thinking, limit, batch_size)
            if limit
            else _compared(batch, model, tokenizer, batch_size)
        )
        results |= dict(zip(indices, found, strict=True))
    return [
        Graded(request, results[index], task.score(request, results[index])) for index, request in enumerate(requests)
    ]


def _check_length(request: Any, ids: Sequence[int], limit: int) -> None:
    if len(ids) >= limit:
        raise UserError(
            "too long", where=request.where or request.text[:60], got=f"{len(ids)} tokens", wanted=f"under {limit}"
        )


def _answers(
    requests: Sequence[Generate],
    model: Transformer,
    tokenizer: Tokenizer,
    thinking: bool | None,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[Result]:
    context = model.config.max_position_embeddings
    prompts = [render(tokenizer, item.messages, item.tools, ask=True, thinking=thinking).ids for item in requests]
    for request, prompt in zip(requests, prompts, strict=True):
        _check_length(request, prompt, context)
    generated = generate(model, prompts, max_new_tokens=max_new_tokens, stop=tokenizer.stop, rows=batch_size)
    for prompt, ids in zip(prompts, generated, strict=True):
        is_truncated = len(ids) == min(max_new_tokens, context - len(prompt))
        yield Result(text=without_reasoning(tokenizer, ids, thinking).strip(), is_truncated=is_truncated)


def _compared(
    requests: Sequence[LogLikelihood], model: Transformer, tokenizer: Tokenizer, batch_size: int
) -> Iterator[Result]:
    """The probability of each request's choices, and the most probable one."""
    rows = []
    for request in requests:
        before = [tokenizer.begin, *tokenizer.encode(request.text)]
        for choice in request.choices:
            ids = [tokenizer.begin, *tokenizer.encode(request.text + choice)]
            _check_length(request, ids, model.config.max_position_embeddings + 1)
            # A token may contain characters of both text and choice: it counts to the choice.
            differing = (place for place, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1])
            rows.append((ids, next(differing, len(before))))
    found = iter(log_likelihoods(model, rows, batch_size))
    for request in requests:
        logps = [next(found) for _ in request.choices]
        yield Result(text=request.choices[logps.index(max(logps))], logps=logps)


def log_likelihoods(model: Transformer, rows: Sequence[tuple[Sequence[int], int]], batch_size: int) -> list[float]:
    """log p of each row's ids from a place on (at least 1), given those before it. The softmax is in float64."""
    longest = max((len(ids) for ids, _ in rows), default=0)
    logps = [0.0] * len(rows)
    if not rows:
        return logps
    with make_engine(model, slots=min(batch_size, len(rows)), max_tokens=longest) as engine:
        submitted = {
            engine.submit(engine_requests.Request(prompt=ids, max_new_tokens=0, prompt_logprobs=True)): index
            for index, (ids, _) in enumerate(rows)
        }
        while not engine.idle:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
                index = submitted[event.request_id]
                logps[index] = math.fsum(token.logp for token in (event.prompt_logprobs or ())[rows[index][1] :])
    return logps


def groups(graded: Sequence[Graded]) -> dict[tuple[str, str], list[Graded]]:
    """What counts, by kind and language."""
    found: dict[tuple[str, str], list[Graded]] = defaultdict(list)
    for one in graded:
        if one.request.is_counted:
            found[one.request.kind, one.request.language].append(one)
    return found


def score_rows(stage: str, graded: Sequence[Graded]) -> list[dict[str, Any]]:
    """Right and asked per kind and language; chance is the mean over what was asked."""
    return [
        {
            "stage": stage,
            "kind": kind,
            "language": language,
            "asked": len(group),
            "right": sum(one.score for one in group),
            "chance": fmean(one.request.chance for one in group),
        }
        for (kind, language), group in groups(graded).items()
    ]


def standard_error(graded: Sequence[Graded]) -> float | None:
    """Of the mean score; a single one has none."""
    scores = [one.score for one in graded]
    return stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None


def accuracy(graded: Sequence[Graded], language: str | None = None) -> float:
    """The mean score of what counts."""
    scores = [one.score for one in graded if one.request.is_counted and language in (None, one.request.language)]
    return fmean(scores) if scores else 0.0
